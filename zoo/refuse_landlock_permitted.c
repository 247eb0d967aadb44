// area: refusals
// shows: a task that may put the right to confine itself into effect, and has no room for the process that would tell whether it has, is refused
// expect: refused "whether it is confined by Landlock"
#include "zoo.h"
#include <sys/prctl.h>
#include <sys/resource.h>

int main(void)
{
	struct rlimit one = { 1, 1 };

	TRY(chmod(".", 0777));
	TRY(setrlimit(RLIMIT_NPROC, &one));
	/* They stay permitted, and the limit is for users other than root. */
	TRY(prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0));
	TRY(setresuid(4321, 4321, 4321));
	CHECK_EQ(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), 0);
	CHECK(fork() < 0 && errno == EAGAIN);
	zoo_ready();
	zoo_wait();
	CHECK(fork() < 0 && errno == EAGAIN);
	zoo_pass();
}
