// area: memory
// shows: all memory of a process may be merged with equal pages (PR_SET_MEMORY_MERGE)
// foreign: no CRIU's images do not have it
#include "zoo.h"
#include <sys/prctl.h>

#ifndef PR_SET_MEMORY_MERGE
#define PR_SET_MEMORY_MERGE 67
#define PR_GET_MEMORY_MERGE 68
#endif

int main(void)
{
	if (prctl(PR_SET_MEMORY_MERGE, 1, 0, 0, 0))
		zoo_skip("no right to have memory merged, or no KSM");
	zoo_ready();
	zoo_wait();
	CHECK_EQ(prctl(PR_GET_MEMORY_MERGE, 0, 0, 0, 0), 1);
	zoo_pass();
}
