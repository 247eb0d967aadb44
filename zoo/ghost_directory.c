// area: unlinked files
// shows: a file whose directory was removed with it, and an open removed directory
// foreign: yes
#include "zoo.h"

int main(void)
{
	int file, dir;
	char text[4];
	struct stat st;

	TRY(mkdir("gone", 0755));
	TRY(mkdir("empty", 0711));
	file = TRY(open("gone/file", O_RDWR | O_CREAT, 0600));
	dir = TRY(open("empty", O_RDONLY | O_DIRECTORY));
	CHECK_EQ(write(file, "abcd", 4), 4);
	TRY(unlink("gone/file"));
	TRY(rmdir("gone"));
	TRY(rmdir("empty"));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(pread(file, text, 4, 0), 4);
	CHECK(memcmp(text, "abcd", 4) == 0);
	TRY(fstat(dir, &st));
	CHECK_EQ(st.st_mode, S_IFDIR | 0711);
	CHECK_EQ(st.st_nlink, 0);
	CHECK(openat(dir, "new", O_CREAT | O_RDWR, 0600) < 0);
	CHECK(access("gone", F_OK) < 0 && access("empty", F_OK) < 0);
	zoo_pass();
}
