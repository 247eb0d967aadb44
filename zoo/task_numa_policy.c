// area: scheduling
// shows: the NUMA policy of a process and of a thread of it, with its flags
// build: -pthread
// foreign: no CRIU's images do not have it
#include "numa_policy.h"
#include <pthread.h>

static void *other(void *unused)
{
	struct numa_policy now;

	numa_choose(MPOL_INTERLEAVE, 1);
	zoo_tell("thread");
	zoo_wait();
	now = numa_policy(NULL);
	CHECK_EQ(now.mode, MPOL_INTERLEAVE);
	CHECK_EQ(now.nodes[0], 1);
	return unused;
}

int main(void)
{
	struct numa_policy now;
	pthread_t thread;

	CHECK(!pthread_create(&thread, NULL, other, NULL));
	numa_choose(MPOL_BIND | MPOL_F_STATIC_NODES, 1);
	zoo_await("thread");
	zoo_ready();
	zoo_wait();
	now = numa_policy(NULL);
	CHECK_EQ(now.mode, MPOL_BIND | MPOL_F_STATIC_NODES);
	CHECK_EQ(now.nodes[0], 1);
	CHECK(!pthread_join(thread, NULL));
	zoo_pass();
}
