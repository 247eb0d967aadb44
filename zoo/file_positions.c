// area: files
// shows: position, access mode and status flags of open files; files of no, some and much content
// foreign: yes
#include "zoo.h"

int main(void)
{
	int half = TRY(open("half", O_RDWR | O_CREAT, 0600)), ro, wo, append, flags, dir;
	char text[16];

	CHECK_EQ(write(half, "0123456789", 10), 10);
	TRY(lseek(half, 5, SEEK_SET));
	ro = TRY(open("half", O_RDONLY | O_NOATIME));
	wo = TRY(open("wo", O_WRONLY | O_CREAT | O_SYNC, 0600));
	CHECK_EQ(write(wo, "abc", 3), 3);
	append = TRY(open("append", O_RDWR | O_CREAT | O_APPEND | O_NONBLOCK, 0600));
	CHECK_EQ(write(append, "abc", 3), 3);
	TRY(lseek(append, 1, SEEK_SET));
	dir = TRY(open(".", O_RDONLY | O_DIRECTORY));
	TRY(lseek(ro, 1ll << 40, SEEK_SET));
	flags = fcntl(wo, F_GETFL);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(read(half, text, sizeof text), 5);
	CHECK(memcmp(text, "56789", 5) == 0);
	CHECK_EQ(lseek(ro, 0, SEEK_CUR), 1ll << 40);
	CHECK(write(ro, "x", 1) < 0 && errno == EBADF);
	CHECK_EQ(fcntl(ro, F_GETFL) & O_NOATIME, O_NOATIME);
	CHECK_EQ(lseek(wo, 0, SEEK_CUR), 3);
	CHECK(read(wo, text, 1) < 0 && errno == EBADF);
	CHECK_EQ(fcntl(wo, F_GETFL), flags);
	CHECK_EQ(read(append, text, 1), 1);
	CHECK_EQ(text[0], 'b');
	CHECK_EQ(write(append, "def", 3), 3);
	CHECK_EQ(pread(append, text, 6, 0), 6);
	CHECK(memcmp(text, "abcdef", 6) == 0);
	CHECK_EQ(fcntl(append, F_GETFL) & (O_APPEND | O_NONBLOCK), O_APPEND | O_NONBLOCK);
	TRY(faccessat(dir, "half", F_OK, 0));
	zoo_pass();
}
