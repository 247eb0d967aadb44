// area: unlinked files
// shows: an open device node that was removed
// foreign: yes
// modes: plain leave-running pidns ns
#include "zoo.h"
#include <sys/sysmacros.h>

int main(void)
{
	struct stat st;
	int fd;

	if (mknod("null", S_IFCHR | 0600, makedev(1, 3)))
		zoo_skip("no right to make a device node");
	fd = TRY(open("null", O_RDWR));
	TRY(unlink("null"));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(write(fd, "x", 1), 1);
	TRY(fstat(fd, &st));
	CHECK(S_ISCHR(st.st_mode));
	CHECK_EQ(st.st_rdev, makedev(1, 3));
	CHECK(access("null", F_OK) < 0);
	zoo_pass();
}
