// area: unlinked files
// shows: two names of a file, both open, both unlinked: still one file
// foreign: yes
#include "zoo.h"

int main(void)
{
	int a = TRY(open("one", O_RDWR | O_CREAT, 0600)), b;
	struct stat sa, sb;
	char text[4];

	TRY(link("one", "two"));
	b = TRY(open("two", O_RDWR));
	TRY(unlink("one"));
	TRY(unlink("two"));
	zoo_ready();
	zoo_wait();
	TRY(fstat(a, &sa));
	TRY(fstat(b, &sb));
	CHECK_EQ(sa.st_ino, sb.st_ino);
	CHECK_EQ(sa.st_nlink, 0);
	CHECK_EQ(pwrite(a, "same", 4, 0), 4);
	CHECK_EQ(pread(b, text, 4, 0), 4);
	CHECK(memcmp(text, "same", 4) == 0);
	zoo_pass();
}
