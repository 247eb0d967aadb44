// area: credentials
// shows: a task that is not dumpable, and one that is
// foreign: yes
#include "zoo.h"
#include <sys/prctl.h>

int main(void)
{
	pid_t child = TRY(fork());

	if (child == 0) {
		TRY(prctl(PR_SET_DUMPABLE, 0));
		zoo_tell("child");
		zoo_wait();
		CHECK_EQ(prctl(PR_GET_DUMPABLE), 0);
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK_EQ(prctl(PR_GET_DUMPABLE), 1);
	CHECK_EXIT(child, 0);
	zoo_pass();
}
