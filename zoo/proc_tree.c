// area: process tree
// shows: a tree of 40 processes in three generations keeps its relations
// foreign: yes
#include "zoo.h"

#define WIDTH 3

static volatile int *leaves;

/* Each process checks its parent and its children, and adds up the size of its tree as its exit code. */
static int grow(int depth)
{
	pid_t me = getpid(), parent = getppid(), children[WIDTH];
	int size = 1;

	for (int i = 0; i < WIDTH && depth; i++) {
		children[i] = TRY(fork());
		if (children[i] == 0)
			_exit(grow(depth - 1));
	}
	if (depth == 0)
		__atomic_add_fetch(leaves, 1, __ATOMIC_SEQ_CST);
	if (depth == 3) {
		WAIT_UNTIL(*leaves == 27);
		zoo_ready();
	}
	zoo_wait();
	CHECK_EQ(getpid(), me);
	CHECK_EQ(getppid(), parent);
	for (int i = 0; i < WIDTH && depth; i++) {
		int status = zoo_reap(children[i]);

		CHECK(WIFEXITED(status));
		size += WEXITSTATUS(status);
	}
	return size;
}

int main(void)
{
	leaves = zoo_map(4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1);
	CHECK_EQ(grow(3), 40);
	zoo_pass();
}
