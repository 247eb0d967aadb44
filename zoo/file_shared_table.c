// area: files
// shows: descriptor tables shared by some children and not by others
// foreign: yes
#include "zoo.h"

#define KCMP_FILES 2

static char stack[65536];

static int keeps(void *arg)
{
	zoo_tell(arg);
	zoo_wait();
	zoo_await("compared");
	return 0;
}

int main(void)
{
	pid_t shares = TRY(clone(keeps, stack + sizeof stack, CLONE_FILES | SIGCHLD, "shares"));
	pid_t copies = TRY(clone(keeps, stack + sizeof stack, SIGCHLD, "copies"));
	int fd;

	zoo_await("shares");
	zoo_await("copies");
	fd = TRY(open("late", O_RDWR | O_CREAT, 0600));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(syscall(SYS_kcmp, getpid(), shares, KCMP_FILES, 0, 0), 0);
	CHECK(syscall(SYS_kcmp, getpid(), copies, KCMP_FILES, 0, 0) > 0);
	CHECK_EQ(syscall(SYS_kcmp, getpid(), shares, 0, fd, fd), 0);
	zoo_tell("compared");
	CHECK_EXIT(shares, 0);
	CHECK_EXIT(copies, 0);
	zoo_pass();
}
