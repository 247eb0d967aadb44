// area: refusals
// shows: a first task in a network namespace that belongs to a user namespace of its child is refused
// modes: plain
// expect: refused "its net namespace: belongs to a user namespace below its own"
#include "zoo.h"
#include <sched.h>

int main(void)
{
	pid_t child = TRY(fork());
	char path[64];
	int fd;

	if (child == 0) {
		TRY(unshare(CLONE_NEWUSER | CLONE_NEWNET));
		zoo_tell("made");
		zoo_wait();
		_exit(3);
	}
	zoo_await("made");
	snprintf(path, sizeof path, "/proc/%d/ns/net", child);
	fd = TRY(open(path, O_RDONLY));
	TRY(setns(fd, CLONE_NEWNET));
	close(fd);
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 3);
	zoo_pass();
}
