// area: unlinked files
// shows: an unlinked file on a tmpfs and a link-remapped one
// options: --link-remap
// modes: pidns ns userns
#include "zoo.h"

int main(void)
{
	int ghost = TRY(open("/tmp/ghost", O_RDWR | O_CREAT, 0600)), file, linked;
	char text[8];
	struct stat a, b;

	CHECK_EQ(write(ghost, "ghost", 5), 5);
	TRY(unlink("/tmp/ghost"));
	file = TRY(open("/tmp/file", O_RDWR | O_CREAT, 0600));
	TRY(mkdir("/tmp/dir", 0700));
	linked = TRY(open("/tmp/dir/one", O_RDWR | O_CREAT, 0600));
	TRY(link("/tmp/dir/one", "/tmp/two"));
	TRY(unlink("/tmp/dir/one"));
	TRY(rmdir("/tmp/dir"));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(pread(ghost, text, 8, 0), 5);
	CHECK(memcmp(text, "ghost", 5) == 0);
	TRY(fstat(linked, &a));
	TRY(stat("/tmp/two", &b));
	CHECK_EQ(a.st_ino, b.st_ino);
	CHECK_EQ(write(file, "x", 1), 1);
	CHECK(access("/tmp/ghost", F_OK) < 0 && access("/tmp/dir", F_OK) < 0);
	zoo_pass();
}
