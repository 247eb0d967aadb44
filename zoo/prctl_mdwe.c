// area: other task state
// shows: a task that may never gain executable memory (PR_SET_MDWE)
// foreign: no CRIU's images do not have it
#include "zoo.h"
#include <sys/prctl.h>

#ifndef PR_SET_MDWE
#define PR_SET_MDWE 65
#define PR_GET_MDWE 66
#define PR_MDWE_REFUSE_EXEC_GAIN 1
#endif

int main(void)
{
	if (prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0))
		zoo_skip("no PR_SET_MDWE");
	zoo_ready();
	zoo_wait();
	CHECK_EQ(prctl(PR_GET_MDWE, 0, 0, 0, 0), PR_MDWE_REFUSE_EXEC_GAIN);
	zoo_pass();
}
