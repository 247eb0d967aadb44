// area: refusals
// shows: a task of a user namespace below that which its time namespace belongs to is refused
// modes: plain leave-running ns
// expect: refused "its time namespace: or that of its children belongs to another user namespace"
#include "zoo.h"
#include <sys/stat.h>

#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x80
#endif

int main(void)
{
	pid_t child;

	TRY(chmod(".", 0777));
	if (unshare(CLONE_NEWTIME))
		zoo_skip("no time namespaces");
	child = TRY(fork());
	if (!child) {
		TRY(unshare(CLONE_NEWUSER));
		zoo_tell("moved");
		zoo_wait();
		_exit(3);
	}
	zoo_await("moved");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 3);
	zoo_pass();
}
