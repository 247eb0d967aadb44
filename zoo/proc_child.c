// area: process tree
// shows: a child keeps its pid and its parent, and can be waited for
// foreign: yes
#include "zoo.h"

int main(void)
{
	pid_t me = getpid(), child = TRY(fork());

	if (child == 0) {
		pid_t self = getpid();

		zoo_tell("child");
		zoo_wait();
		CHECK_EQ(getpid(), self);
		CHECK_EQ(getppid(), me);
		_exit(42);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 42);
	CHECK(waitpid(-1, NULL, 0) < 0 && errno == ECHILD);
	zoo_pass();
}
