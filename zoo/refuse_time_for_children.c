// area: refusals
// shows: a time namespace that is only for children is refused
// modes: plain leave-running
// expect: refused "its time namespace for children: has no task"
#include "zoo.h"

#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x80
#endif

int main(void)
{
	if (unshare(CLONE_NEWTIME))
		zoo_skip("no time namespaces");
	zoo_ready();
	zoo_wait();
	zoo_pass();
}
