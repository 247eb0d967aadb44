// area: unlinked files
// shows: an unlinked write-only file under whose name a new file stands
// foreign: yes
#include "zoo.h"

int main(void)
{
	int old = TRY(open("name", O_WRONLY | O_CREAT, 0600)), new, read_old;
	char link[64], text[8];

	CHECK_EQ(write(old, "old", 3), 3);
	TRY(unlink("name"));
	new = TRY(open("name", O_RDWR | O_CREAT | O_EXCL, 0600));
	CHECK_EQ(write(new, "newer", 5), 5);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(write(old, "er", 2), 2);
	snprintf(link, sizeof link, "/proc/self/fd/%d", old);
	read_old = TRY(open(link, O_RDONLY));
	CHECK_EQ(read(read_old, text, 8), 5);
	CHECK(memcmp(text, "older", 5) == 0);
	CHECK_EQ(pread(new, text, 8, 0), 5);
	CHECK(memcmp(text, "newer", 5) == 0);
	TRY(access("name", F_OK));
	zoo_pass();
}
