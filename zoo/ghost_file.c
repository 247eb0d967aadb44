// area: unlinked files
// shows: an unlinked file with odd mode bits, owner and old time stamps, open twice and by a child
// foreign: yes
#include "zoo.h"

int main(void)
{
	int a = TRY(open("ghost", O_RDWR | O_CREAT, 0600)), b = TRY(open("ghost", O_RDONLY));
	struct timespec times[2] = { { 1000000, 5 }, { 2000000, 7 } };
	static char data[1 << 20], back[1 << 20];
	struct stat before, after;
	pid_t child;

	zoo_fill(data, sizeof data, 3);
	CHECK_EQ(write(a, data, sizeof data), sizeof data);
	TRY(fchown(a, 5, 6));
	TRY(fchmod(a, 06421));
	TRY(futimens(a, times));
	TRY(unlink("ghost"));
	TRY(fstat(a, &before));
	child = TRY(fork());
	if (child == 0) {
		zoo_tell("child");
		/* Writing may take the set-user-id bit away. */
		zoo_await("looked");
		CHECK_EQ(pwrite(a, "child", 5, 0), 5);
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	TRY(fstat(a, &after));
	CHECK_EQ(after.st_mode, before.st_mode);
	CHECK_EQ(after.st_uid, 5);
	CHECK_EQ(after.st_gid, 6);
	CHECK_EQ(after.st_size, before.st_size);
	CHECK_EQ(after.st_nlink, 0);
	zoo_tell("looked");
	CHECK_EXIT(child, 0);
	CHECK_EQ(lseek(a, 0, SEEK_CUR), sizeof data);
	CHECK_EQ(pread(b, back, sizeof back, 0), sizeof back);
	CHECK(memcmp(back, "child", 5) == 0);
	CHECK(memcmp(back + 5, data + 5, sizeof data - 5) == 0);
	CHECK(access("ghost", F_OK) < 0);
	zoo_pass();
}
