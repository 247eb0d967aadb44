// area: mounts
// shows: a mount namespace without /proc and /dev/pts
// modes: pidns ns
#include "zoo.h"
#include <sys/mount.h>

int main(void)
{
	TRY(umount2("/dev/pts", 0));
	TRY(umount2("/proc", MNT_DETACH));
	zoo_ready();
	zoo_wait();
	CHECK(access("/proc/self", F_OK) < 0);
	TRY(mount("proc", "/proc", "proc", 0, NULL));
	TRY(access("/proc/self", F_OK));
	zoo_pass();
}
