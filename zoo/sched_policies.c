// area: other task state
// shows: scheduling: nice values, SCHED_RR with reset on fork, SCHED_BATCH, SCHED_IDLE, affinity
// modes: plain leave-running pidns ns
// foreign: no CRIU's images do not have the affinity
#include "zoo.h"
#include <sys/resource.h>

int main(void)
{
	int nices[] = { -20, 19, 1 };
	pid_t pids[6];
	cpu_set_t one, now;

	CPU_ZERO(&one);
	CPU_SET(0, &one);
	for (int i = 0; i < 6; i++) {
		struct sched_param param = { .sched_priority = i == 3 ? 7 : 0 };
		int policy = i == 3 ? SCHED_RR | SCHED_RESET_ON_FORK : i == 4 ? SCHED_BATCH : SCHED_IDLE;
		char name[8];

		snprintf(name, sizeof name, "child%d", i);
		pids[i] = TRY(fork());
		if (pids[i]) {
			zoo_await(name);
			continue;
		}
		if (i < 3)
			TRY(setpriority(PRIO_PROCESS, 0, nices[i]));
		else if (sched_setscheduler(0, policy, &param))
			_exit(1);
		if (i == 0)
			TRY(sched_setaffinity(0, sizeof one, &one));
		zoo_tell(name);
		zoo_wait();
		if (i < 3)
			CHECK_EQ(getpriority(PRIO_PROCESS, 0), nices[i]);
		else
			CHECK_EQ(sched_getscheduler(0), policy);
		TRY(sched_getparam(0, &param));
		CHECK_EQ(param.sched_priority, i == 3 ? 7 : 0);
		TRY(sched_getaffinity(0, sizeof now, &now));
		if (i == 0)
			CHECK(CPU_EQUAL(&now, &one));
		_exit(0);
	}
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 6; i++)
		CHECK_EXIT(pids[i], 0);
	zoo_pass();
}
