// area: refusals
// shows: a thread with deadlines (SCHED_DEADLINE) is refused by name
// modes: -userns
// expect: refused "SCHED_DEADLINE"
#include "zoo.h"

/* sched(7): this library has no wrapper for it. */
struct attributes {
	uint32_t size, policy;
	uint64_t flags;
	int32_t nice;
	uint32_t priority;
	uint64_t runtime, deadline, period;
};

int main(void)
{
	struct attributes attr = { .size = sizeof attr, .policy = 6 /* SCHED_DEADLINE */, .runtime = 10000000,
				   .deadline = 100000000, .period = 100000000 };

	if (syscall(SYS_sched_setattr, 0, &attr, 0))
		zoo_skip("no deadlines");
	zoo_ready();
	zoo_wait();
	CHECK_EQ(syscall(SYS_sched_getattr, 0, &attr, sizeof attr, 0), 0);
	CHECK_EQ(attr.policy, 6u);
	zoo_pass();
}
