// area: refusals
// shows: a task whose parent has made a user namespace and moved into it later is refused
// modes: plain
// expect: refused "its user namespace: is not that of its parent nor below it"
#include "zoo.h"
#include <sched.h>

int main(void)
{
	pid_t parent = TRY(fork()), child;

	if (parent == 0) {
		child = TRY(fork());
		if (child == 0) {
			zoo_wait();
			_exit(3);
		}
		TRY(unshare(CLONE_NEWUSER));
		zoo_tell("moved");
		CHECK_EXIT(child, 3);
		_exit(4);
	}
	zoo_await("moved");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(parent, 4);
	zoo_pass();
}
