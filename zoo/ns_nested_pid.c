// area: other namespaces
// shows: a pid namespace inside of the tree is refused by name
// expect: refused "its pid namespace: is another one"
// modes: plain pidns ns
#include "zoo.h"

static int inner(void *arg)
{
	(void)arg;
	CHECK_EQ(getpid(), 1);
	zoo_tell("inner");
	zoo_wait();
	CHECK_EQ(getpid(), 1);
	return 9;
}

int main(void)
{
	static char stack[65536] __attribute__((aligned(16)));
	pid_t child = TRY(clone(inner, stack + sizeof stack, CLONE_NEWPID | SIGCHLD, NULL));

	zoo_await("inner");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 9);
	zoo_pass();
}
