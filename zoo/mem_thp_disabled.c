// area: memory
// shows: transparent huge pages stay disabled for the task
// foreign: yes
#include "zoo.h"
#include <sys/prctl.h>

int main(void)
{
	if (prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0))
		zoo_skip("no PR_SET_THP_DISABLE");
	zoo_ready();
	zoo_wait();
	CHECK_EQ(prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0), 1);
	TRY(prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0));
	zoo_pass();
}
