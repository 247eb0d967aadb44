// area: refusals
// shows: a network namespace that only a mount keeps, and no task lives in, is refused
// modes: pidns ns
// expect: refused "which no task of the tree lives in"
#include "zoo.h"
#include <sys/mount.h>

int main(void)
{
	pid_t child = TRY(fork());
	char from[64];

	if (!child) {
		TRY(unshare(CLONE_NEWNET));
		zoo_tell("apart");
		zoo_await("kept");
		_exit(3);
	}
	zoo_await("apart");
	close(TRY(open("alone", O_CREAT | O_RDONLY | O_CLOEXEC, 0444)));
	snprintf(from, sizeof from, "/proc/%d/ns/net", child);
	TRY(mount(from, "alone", NULL, MS_BIND, NULL));
	zoo_tell("kept");
	CHECK_EXIT(child, 3);
	zoo_ready();
	zoo_wait();
	TRY(umount("alone"));
	zoo_pass();
}
