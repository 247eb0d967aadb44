// area: threads
// shows: a process whose first thread has exited
// expect: refused "main thread"
#include "zoo.h"
#include <pthread.h>

static void *work(void *arg)
{
	char status[64];

	(void)arg;
	snprintf(status, sizeof status, "/proc/%d/task/%d/status", getpid(), getpid());
	WAIT_UNTIL(strstr(zoo_slurp(status), "State:\tZ"));
	zoo_ready();
	zoo_wait();
	CHECK(strstr(zoo_slurp(status), "State:\tZ"));
	CHECK(syscall(SYS_gettid) != getpid());
	zoo_pass();
}

int main(void)
{
	pthread_t thread;

	if (access("/proc/self/status", R_OK))
		zoo_skip("no /proc");
	CHECK(pthread_create(&thread, NULL, work, NULL) == 0);
	/* pthread_exit() would want a library of the compiler. */
	syscall(SYS_exit, 0);
	return 1;
}
