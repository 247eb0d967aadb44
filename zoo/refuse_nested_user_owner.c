// area: refusals
// shows: a task in a network namespace that belongs to a user namespace in which nobody lives is
//   refused
// modes: plain
// expect: refused "its net namespace: belongs to a user namespace that no task lives in"
#include "zoo.h"
#include <sched.h>

int main(void)
{
	pid_t maker = TRY(fork());
	char path[64];
	int fd;

	if (maker == 0) {
		TRY(unshare(CLONE_NEWUSER | CLONE_NEWNET));
		zoo_tell("made");
		zoo_await("entered");
		_exit(0);
	}
	zoo_await("made");
	snprintf(path, sizeof path, "/proc/%d/ns/net", maker);
	fd = TRY(open(path, O_RDONLY));
	TRY(setns(fd, CLONE_NEWNET));
	close(fd);
	zoo_tell("entered");
	CHECK_EXIT(maker, 0);
	zoo_ready();
	zoo_wait();
	zoo_pass();
}
