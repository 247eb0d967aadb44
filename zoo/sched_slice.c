// area: other task state
// shows: a slice of processor time of one's own (Linux 6.12 and later), of a thread too; who has none gets none
// build: -pthread
// foreign: no CRIU's images do not have it
#include "zoo.h"
#include <pthread.h>

/* struct sched_attr, which the C library of Debian 12 lacks. */
struct attributes {
	uint32_t size, policy;
	uint64_t flags;
	int32_t nice;
	uint32_t priority;
	uint64_t runtime, deadline, period;
};

static uint64_t slice(void)
{
	struct attributes attr = { 0 };

	TRY(syscall(SYS_sched_getattr, 0, &attr, sizeof attr, 0));
	CHECK_EQ(attr.policy, SCHED_OTHER);
	return attr.runtime;
}

static void choose(uint64_t ns)
{
	struct attributes attr = { .size = sizeof attr, .runtime = ns };

	TRY(syscall(SYS_sched_setattr, 0, &attr, 0));
}

static void *other(void *unused)
{
	choose(50 * 1000 * 1000);
	zoo_tell("thread");
	zoo_wait();
	CHECK_EQ(slice(), 50 * 1000 * 1000);
	return unused;
}

int main(void)
{
	pthread_t thread;
	uint64_t machine = slice();
	pid_t child;

	if (!machine)
		zoo_skip("no slices");
	child = TRY(fork());
	if (!child) {
		zoo_tell("child");
		zoo_wait();
		CHECK_EQ(slice(), machine);
		_exit(7);
	}
	zoo_await("child");
	CHECK(!pthread_create(&thread, NULL, other, NULL));
	zoo_await("thread");
	choose(100 * 1000);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(slice(), 100 * 1000);
	CHECK(!pthread_join(thread, NULL));
	CHECK_EXIT(child, 7);
	zoo_pass();
}
