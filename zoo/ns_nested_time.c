// area: other namespaces
// shows: a time namespace inside of the tree is refused by name
// modes: plain ns
// expect: refused "its time namespace: is another one"
#include "zoo.h"
#include <sys/prctl.h>

#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x80
#endif

int main(void)
{
	int status;
	pid_t between;

	TRY(prctl(PR_SET_CHILD_SUBREAPER, 1));
	between = TRY(fork());
	if (!between) {
		/* Only children get into it. */
		if (unshare(CLONE_NEWTIME))
			_exit(77);
		if (TRY(fork()) == 0) {
			zoo_tell("child");
			zoo_wait();
			_exit(3);
		}
		_exit(0);
	}
	CHECK_EQ(waitpid(between, &status, 0), between);
	if (WEXITSTATUS(status) == 77)
		zoo_skip("no time namespaces");
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK(wait(&status) > 0);
	CHECK_EQ(WEXITSTATUS(status), 3);
	zoo_pass();
}
