// area: scheduling
// shows: the priority for I/O, of a process and of a thread of it
// build: -pthread
// foreign: no CRIU's images do not have it
#include "zoo.h"
#include <linux/ioprio.h>
#include <pthread.h>

static int best_effort(int level)
{
	return IOPRIO_PRIO_VALUE(IOPRIO_CLASS_BE, level);
}

static void *other(void *unused)
{
	TRY(syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, IOPRIO_PRIO_VALUE(IOPRIO_CLASS_IDLE, 0)));
	zoo_tell("thread");
	zoo_wait();
	CHECK_EQ(syscall(SYS_ioprio_get, IOPRIO_WHO_PROCESS, 0), IOPRIO_PRIO_VALUE(IOPRIO_CLASS_IDLE, 0));
	return unused;
}

int main(void)
{
	pthread_t thread;
	pid_t child;

	TRY(syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, best_effort(6)));
	CHECK(!pthread_create(&thread, NULL, other, NULL));
	child = TRY(fork());
	if (child == 0) {
		TRY(syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, IOPRIO_PRIO_VALUE(IOPRIO_CLASS_NONE, 0)));
		zoo_tell("child");
		zoo_wait();
		CHECK_EQ(IOPRIO_PRIO_CLASS(syscall(SYS_ioprio_get, IOPRIO_WHO_PROCESS, 0)), IOPRIO_CLASS_NONE);
		_exit(7);
	}
	zoo_await("thread");
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK_EQ(syscall(SYS_ioprio_get, IOPRIO_WHO_PROCESS, 0), best_effort(6));
	CHECK(!pthread_join(thread, NULL));
	CHECK_EXIT(child, 7);
	zoo_pass();
}
