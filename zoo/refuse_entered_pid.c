// area: refusals
// shows: a task whose parent has entered another pid namespace of the tree (setns(2)) is refused
// modes: plain
// expect: refused "its pid namespace: is one that its parent has entered"
#include "zoo.h"

int main(void)
{
	char path[64];
	pid_t maker = TRY(fork()), enters, first;

	if (maker == 0) {
		TRY(unshare(CLONE_NEWPID));
		first = TRY(fork());
		if (first == 0) {
			zoo_wait();
			_exit(0);
		}
		snprintf(path, sizeof path, "%d", first);
		zoo_write("first", path);
		zoo_wait();
		CHECK_EXIT(first, 0);
		_exit(0);
	}
	zoo_await("first");
	enters = TRY(fork());
	if (enters == 0) {
		char text[16] = "";
		int fd = TRY(open(zoo_path("first"), O_RDONLY));

		TRY(read(fd, text, sizeof text - 1));
		snprintf(path, sizeof path, "/proc/%s/ns/pid", text);
		fd = TRY(open(path, O_RDONLY));
		TRY(setns(fd, CLONE_NEWPID));
		first = TRY(fork());
		if (first == 0) {
			CHECK_EQ(getpid(), 2);
			zoo_tell("entered");
			zoo_wait();
			_exit(0);
		}
		/* It may have ended with the namespace. */
		zoo_reap(first);
		_exit(0);
	}
	zoo_await("entered");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(enters, 0);
	CHECK_EXIT(maker, 0);
	zoo_pass();
}
