// area: other task state
// shows: timer slack, child subreaper, io flusher, machine-check policy, speculation, TSC mode
#include "zoo.h"
#include <sys/prctl.h>

#ifndef PR_SET_MDWE
#define PR_SET_MDWE 65
#define PR_GET_MDWE 66
#define PR_MDWE_REFUSE_EXEC_GAIN 1
#endif

int main(void)
{
	int tsc, mce, mdwe;
	pid_t child;

	TRY(prctl(PR_SET_TIMERSLACK, 123456));
	TRY(prctl(PR_MCE_KILL, PR_MCE_KILL_SET, PR_MCE_KILL_EARLY, 0, 0));
	child = TRY(fork());
	if (child == 0) {
		mdwe = prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0);
		zoo_tell("child");
		zoo_wait();
		if (mdwe == 0)
			CHECK_EQ(prctl(PR_GET_MDWE, 0, 0, 0, 0), PR_MDWE_REFUSE_EXEC_GAIN);
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK_EQ(prctl(PR_GET_TIMERSLACK), 123456);
	mce = prctl(PR_MCE_KILL_GET, 0, 0, 0, 0);
	CHECK_EQ(mce, PR_MCE_KILL_EARLY);
	TRY(prctl(PR_GET_TSC, &tsc));
	CHECK_EQ(tsc, PR_TSC_ENABLE);
	CHECK_EXIT(child, 0);
	zoo_pass();
}
