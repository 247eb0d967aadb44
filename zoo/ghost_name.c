// area: unlinked files
// shows: an unlinked file with quotes, newline, percent and backslash in its name, in a read-only directory
// foreign: yes
#include "zoo.h"

int main(void)
{
	const char *name = "dir/it's \"100%\"\n\\ now";
	int fd;
	char text[4];

	TRY(mkdir("dir", 0700));
	fd = TRY(open(name, O_RDWR | O_CREAT, 0600));
	CHECK_EQ(write(fd, "abcd", 4), 4);
	TRY(unlink(name));
	TRY(chmod("dir", 0500));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(pread(fd, text, 4, 0), 4);
	CHECK(memcmp(text, "abcd", 4) == 0);
	CHECK(access(name, F_OK) < 0);
	TRY(chmod("dir", 0700));
	zoo_pass();
}
