// area: refusals
// shows: a task in a pid namespace that its parent has entered (setns(2)), and whose first task is
//   outside of the tree, is refused
// modes: plain leave-running
// expect: refused "whose first task is outside of the tree"
#include "zoo.h"

int main(void)
{
	pid_t between = TRY(fork()), enters, child;
	char path[64];
	int fd;

	if (!between) {
		/* Whoever adopts it is no task of this tree. */
		if (TRY(fork()))
			_exit(0);
		TRY(setsid());
		TRY(unshare(CLONE_NEWPID));
		child = TRY(fork());
		if (!child) {
			zoo_await("others-gone");
			_exit(0);
		}
		snprintf(path, sizeof path, "/proc/%d/ns/pid", child);
		zoo_write("outside", path);
		zoo_reap(child);
		_exit(0);
	}
	CHECK_EXIT(between, 0);
	zoo_await("outside");
	enters = TRY(fork());
	if (!enters) {
		char text[64] = "";

		fd = TRY(open(zoo_path("outside"), O_RDONLY));
		TRY(read(fd, text, sizeof text - 1));
		TRY(close(fd));
		zoo_enter_pid(text);
		child = TRY(fork());
		if (!child) {
			zoo_tell("entered");
			zoo_wait();
			_exit(3);
		}
		CHECK_EXIT(child, 3);
		_exit(4);
	}
	zoo_await("entered");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(enters, 4);
	zoo_tell("others-gone");
	zoo_pass();
}
