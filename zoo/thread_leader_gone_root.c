// area: threads
// shows: the root task without its first thread, under another user id
// foreign: no CRIU refuses processes without their first thread
#include "zoo.h"
#include <pthread.h>

static char status[64];

static void *work(void *arg)
{
	(void)arg;
	snprintf(status, sizeof status, "/proc/%d/task/%d/status", getpid(), getpid());
	WAIT_UNTIL(strstr(zoo_slurp(status), "State:\tZ"));
	zoo_ready();
	zoo_wait();
	CHECK(strstr(zoo_slurp(status), "State:\tZ"));
	CHECK(strstr(zoo_slurp(status), "Uid:\t65534\t65534"));
	CHECK(syscall(SYS_gettid) != getpid());
	CHECK_EQ(getuid(), 0);
	CHECK_EQ(kill(getpid(), 0), 0);
	zoo_pass();
}

int main(void)
{
	pthread_t thread;

	if (access("/proc/self/status", R_OK))
		zoo_skip("no /proc");
	zoo_need_pidfds_of_threads();
	CHECK(pthread_create(&thread, NULL, work, NULL) == 0);
	/* Of this thread alone. */
	TRY(syscall(SYS_setresuid, 65534, 65534, 65534));
	syscall(SYS_exit, 0);
	return 1;
}
