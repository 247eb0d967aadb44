// area: process tree
// shows: a task that computes without any system call goes on computing
// foreign: yes
#include "zoo.h"

int main(void)
{
	volatile unsigned long *shared = zoo_map(4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1);
	pid_t child = TRY(fork());
	unsigned long seen;

	if (child == 0)
		for (;;)
			++*shared;
	WAIT_UNTIL(*shared);
	zoo_ready();
	zoo_wait();
	seen = *shared;
	WAIT_UNTIL(*shared != seen);
	CHECK(kill(child, SIGKILL) == 0);
	CHECK_EQ(zoo_reap(child), SIGKILL);
	zoo_pass();
}
