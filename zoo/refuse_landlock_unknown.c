// area: refusals
// shows: a task that may be confined by Landlock, and has no room for the process that would tell, is refused
// expect: refused "whether it is confined by Landlock"
#include "landlock.h"
#include <sys/resource.h>

int main(void)
{
	struct rlimit one = { 1, 1 };

	close(no_directories());
	TRY(chmod(".", 0777));
	TRY(setrlimit(RLIMIT_NPROC, &one));
	/* The limit is for users other than root. */
	TRY(setresuid(4321, 4321, 4321));
	TRY(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	CHECK(fork() < 0 && errno == EAGAIN);
	zoo_ready();
	zoo_wait();
	CHECK(fork() < 0 && errno == EAGAIN);
	zoo_pass();
}
