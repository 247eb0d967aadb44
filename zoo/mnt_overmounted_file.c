// area: mounts
// shows: an open file that a later mount hides is refused
// modes: pidns ns userns
// expect: refused "mount"
#include "zoo.h"
#include <sys/mount.h>

int main(void)
{
	int fd;

	TRY(mkdir("dir", 0755));
	fd = TRY(open("dir/file", O_CREAT | O_RDWR, 0600));
	TRY(mount("tmpfs", "dir", "tmpfs", 0, ""));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(write(fd, "x", 1), 1);
	TRY(umount("dir"));
	TRY(access("dir/file", F_OK));
	zoo_pass();
}
