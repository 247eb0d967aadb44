// area: threads
// shows: a process whose first thread has exited, its exit code, its child and its files
// foreign: no CRIU refuses processes without their first thread
#include "zoo.h"
#include <pthread.h>

static int pipes[2];
static volatile int second_ready;
static pthread_t other;

static int leader_is_gone(void)
{
	char status[64];

	snprintf(status, sizeof status, "/proc/%d/task/%d/status", getpid(), getpid());
	return strstr(zoo_slurp(status), "State:\tZ") != NULL;
}

static void *second(void *arg)
{
	(void)arg;
	second_ready = 1;
	zoo_wait();
	CHECK(leader_is_gone());
	syscall(SYS_exit, 9);
	return NULL;
}

static void *work(void *arg)
{
	char byte = 0;
	pid_t child;

	(void)arg;
	WAIT_UNTIL(leader_is_gone());
	child = TRY(fork());
	if (child == 0) {
		zoo_tell("child");
		zoo_wait();
		TRY(write(pipes[1], "x", 1));
		_exit(5);
	}
	zoo_await("child");
	WAIT_UNTIL(second_ready);
	zoo_tell("leaderless");
	zoo_wait();
	CHECK(leader_is_gone());
	CHECK(syscall(SYS_gettid) != getpid());
	CHECK_EQ(read(pipes[0], &byte, 1), 1);
	CHECK_EQ(byte, 'x');
	CHECK_EXIT(child, 5);
	CHECK(pthread_join(other, NULL) == 0);
	syscall(SYS_exit, 4);
	return NULL;
}

int main(void)
{
	pthread_t thread;
	pid_t leaderless;

	if (access("/proc/self/status", R_OK))
		zoo_skip("no /proc");
	zoo_need_pidfds_of_threads();
	leaderless = TRY(fork());
	if (leaderless == 0) {
		TRY(pipe(pipes));
		CHECK(pthread_create(&other, NULL, second, NULL) == 0);
		CHECK(pthread_create(&thread, NULL, work, NULL) == 0);
		/* pthread_exit() would want a library of the compiler. */
		syscall(SYS_exit, 3);
	}
	zoo_await("leaderless");
	zoo_ready();
	zoo_wait();
	/* All threads end by themselves: the code of the last one is that of the process. */
	CHECK_EXIT(leaderless, 4);
	zoo_pass();
}
