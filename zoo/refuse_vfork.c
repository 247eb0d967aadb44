// area: refusals
// shows: a parent that is suspended in vfork is refused
// expect: refused "vfork"
#include "zoo.h"

static int waits(void *arg)
{
	(void)arg;
	zoo_ready();
	zoo_wait();
	_exit(6);
}

int main(void)
{
	static char stack[1 << 16] __attribute__((aligned(16)));
	pid_t child = TRY(clone(waits, stack + sizeof stack, CLONE_VFORK | SIGCHLD, NULL));

	CHECK_EXIT(child, 6);
	zoo_pass();
}
