// area: files
// shows: descriptors made by dup and fork share a position, opened ones do not; close-on-exec is each one's
// foreign: yes
#include "zoo.h"

int main(void)
{
	int a = TRY(open("file", O_RDWR | O_CREAT, 0600)), b = TRY(dup(a)), c, d;
	pid_t child;

	CHECK_EQ(write(a, "0123456789", 10), 10);
	c = TRY(open("file", O_RDWR));
	d = TRY(fcntl(a, F_DUPFD_CLOEXEC, 100));
	TRY(lseek(c, 2, SEEK_SET));
	child = TRY(fork());
	if (child == 0) {
		TRY(close(b));
		zoo_tell("child");
		zoo_await("moved");
		CHECK_EQ(lseek(a, 0, SEEK_CUR), 4);
		CHECK_EQ(lseek(d, 0, SEEK_CUR), 4);
		TRY(lseek(a, 7, SEEK_SET));
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK_EQ(fcntl(a, F_GETFD), 0);
	CHECK_EQ(fcntl(d, F_GETFD), FD_CLOEXEC);
	TRY(lseek(b, 4, SEEK_SET));
	zoo_tell("moved");
	CHECK_EXIT(child, 0);
	CHECK_EQ(lseek(b, 0, SEEK_CUR), 7);
	CHECK_EQ(lseek(c, 0, SEEK_CUR), 2);
	CHECK_EQ(syscall(SYS_kcmp, getpid(), getpid(), 0, a, d), 0);
	CHECK(syscall(SYS_kcmp, getpid(), getpid(), 0, a, c) > 0);
	zoo_pass();
}
