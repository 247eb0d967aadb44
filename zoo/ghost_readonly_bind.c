// area: unlinked files
// shows: an unlinked file that is open through a read-only bind mount as well
// modes: pidns ns userns
#include "zoo.h"
#include <sys/mount.h>

int main(void)
{
	int written, bound;
	char text[8];
	struct stat a, b;

	TRY(mkdir("/tmp/a", 0700));
	TRY(mkdir("/tmp/b", 0700));
	TRY(mount("/tmp/a", "/tmp/b", NULL, MS_BIND, NULL));
	written = TRY(open("/tmp/a/file", O_RDWR | O_CREAT, 0600));
	bound = TRY(open("/tmp/b/file", O_RDONLY));
	CHECK_EQ(write(written, "ghost", 5), 5);
	TRY(unlink("/tmp/a/file"));
	TRY(mount(NULL, "/tmp/b", NULL, MS_BIND | MS_REMOUNT | MS_RDONLY, NULL));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(pread(bound, text, 8, 0), 5);
	CHECK(memcmp(text, "ghost", 5) == 0);
	CHECK_EQ(pwrite(written, "G", 1, 0), 1);
	CHECK_EQ(pread(bound, text, 1, 0), 1);
	CHECK_EQ(text[0], 'G');
	TRY(fstat(written, &a));
	TRY(fstat(bound, &b));
	CHECK(a.st_ino == b.st_ino && a.st_nlink == 0);
	CHECK(open("/tmp/b/new", O_RDWR | O_CREAT, 0600) < 0 && errno == EROFS);
	CHECK(access("/tmp/a/file", F_OK) < 0);
	zoo_pass();
}
