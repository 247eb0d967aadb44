// area: refusals
// shows: a task that Landlock confines by a right that it has given up since, is refused
// expect: refused "Landlock domain (1 of 16 layers)"
#include "landlock.h"

int main(void)
{
	int fd = no_directories();

	if (syscall(SYS_landlock_restrict_self, fd, 0) < 0)
		zoo_skip("no CAP_SYS_ADMIN");
	TRY(close(fd));
	TRY(chmod(".", 0777));
	TRY(setresgid(4321, 4321, 4321));
	TRY(setresuid(4321, 4321, 4321));
	CHECK_EQ(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), 0);
	zoo_ready();
	zoo_wait();
	CHECK(mkdir("directory", 0700) < 0 && errno == EACCES);
	zoo_pass();
}
