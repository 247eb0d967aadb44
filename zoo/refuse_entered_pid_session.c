// area: refusals
// shows: a task in a pid namespace that its parent has entered (setns(2)) before it began a session is
//   refused
// modes: plain leave-running
// expect: refused "its session is not that of its parent"
#include "zoo.h"

int main(void)
{
	pid_t maker = TRY(fork()), enters, child;
	char path[64] = "";

	if (!maker) {
		TRY(unshare(CLONE_NEWPID));
		child = TRY(fork());
		if (!child) {
			zoo_tell("first");
			zoo_await("others-gone");
			_exit(0);
		}
		CHECK_EXIT(child, 0);
		_exit(0);
	}
	zoo_await("first");
	enters = TRY(fork());
	if (!enters) {
		snprintf(path, sizeof path, "/proc/%d/ns/pid_for_children", maker);
		zoo_enter_pid(path);
		child = TRY(fork());
		if (!child) {
			zoo_wait();
			_exit(3);
		}
		TRY(setsid());
		zoo_tell("entered");
		CHECK_EXIT(child, 3);
		_exit(4);
	}
	zoo_await("entered");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(enters, 4);
	zoo_tell("others-gone");
	CHECK_EXIT(maker, 0);
	zoo_pass();
}
