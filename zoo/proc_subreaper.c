// area: process tree
// shows: the subreaper flag: orphans go to the subreaper, those from before stay with init
// modes: pidns ns userns
#include "zoo.h"
#include <sys/prctl.h>

static pid_t orphan(const char *name)
{
	pid_t parent = TRY(fork());

	if (parent == 0) {
		parent = getpid();
		if (TRY(fork()) == 0) {
			WAIT_UNTIL(getppid() != parent);
			zoo_tell(name);
			zoo_wait();
			_exit(getppid() == 1 ? 11 : 22);
		}
		_exit(0);
	}
	CHECK_EXIT(parent, 0);
	zoo_await(name);
	return 0;
}

int main(void)
{
	int flag = 0, status;
	pid_t late;

	orphan("early");
	TRY(prctl(PR_SET_CHILD_SUBREAPER, 1));
	orphan("late");
	zoo_ready();
	zoo_wait();
	TRY(prctl(PR_GET_CHILD_SUBREAPER, &flag));
	CHECK_EQ(flag, 1);
	/* Only the late orphan is ours, and it knows its parent. */
	late = TRY(wait(&status));
	CHECK(late > 0);
	CHECK_EQ(WEXITSTATUS(status), 22);
	CHECK(wait(NULL) < 0 && errno == ECHILD);
	zoo_pass();
}
