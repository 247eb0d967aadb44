// area: credentials
// shows: the no_new_privs flag
// foreign: yes
#include "zoo.h"
#include <sys/prctl.h>

int main(void)
{
	pid_t child = TRY(fork());

	if (child == 0) {
		TRY(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
		zoo_tell("child");
		zoo_wait();
		CHECK_EQ(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), 1);
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK_EQ(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), 0);
	CHECK_EXIT(child, 0);
	zoo_pass();
}
