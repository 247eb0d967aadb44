// area: other task state
// shows: timer slack and machine-check policy
// foreign: no CRIU's images do not have the timer slack
#include "zoo.h"
#include <sys/prctl.h>


int main(void)
{
	int tsc;

	TRY(prctl(PR_SET_TIMERSLACK, 123456));
	TRY(prctl(PR_MCE_KILL, PR_MCE_KILL_SET, PR_MCE_KILL_EARLY, 0, 0));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(prctl(PR_GET_TIMERSLACK), 123456);
	CHECK_EQ(prctl(PR_MCE_KILL_GET, 0, 0, 0, 0), PR_MCE_KILL_EARLY);
	TRY(prctl(PR_GET_TSC, &tsc));
	CHECK_EQ(tsc, PR_TSC_ENABLE);
	zoo_pass();
}
