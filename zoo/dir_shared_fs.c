// area: directories
// shows: two tasks that share working directory and umask, and one that does not
// foreign: yes
#include "zoo.h"

#define KCMP_FS 3

static char stack[65536];

static int keeps(void *arg)
{
	zoo_tell(arg);
	zoo_await("compared");
	return 0;
}

int main(void)
{
	pid_t shares = TRY(clone(keeps, stack + sizeof stack, CLONE_FS | SIGCHLD, "shares"));
	pid_t copies = TRY(clone(keeps, stack + sizeof stack, SIGCHLD, "copies"));

	zoo_await("shares");
	zoo_await("copies");
	zoo_ready();
	zoo_wait();
	CHECK_EQ(syscall(SYS_kcmp, getpid(), shares, KCMP_FS, 0, 0), 0);
	CHECK(syscall(SYS_kcmp, getpid(), copies, KCMP_FS, 0, 0) > 0);
	zoo_tell("compared");
	CHECK_EXIT(shares, 0);
	CHECK_EXIT(copies, 0);
	zoo_pass();
}
