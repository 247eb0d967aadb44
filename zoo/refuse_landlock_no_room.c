// area: refusals
// shows: a task with no room for the process that would tell whether Landlock confines it is refused, though it cannot confine itself any more
// expect: refused "whether it is confined by Landlock"
#include "zoo.h"
#include <sys/prctl.h>
#include <sys/resource.h>

int main(void)
{
	struct rlimit one = { 1, 1 };

	TRY(chmod(".", 0777));
	TRY(setrlimit(RLIMIT_NPROC, &one));
	/* The limit is for users other than root. */
	TRY(setresuid(4321, 4321, 4321));
	CHECK_EQ(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), 0);
	CHECK(fork() < 0 && errno == EAGAIN);
	zoo_ready();
	zoo_wait();
	CHECK(fork() < 0 && errno == EAGAIN);
	zoo_pass();
}
