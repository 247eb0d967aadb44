// area: refusals
// shows: a task that Landlock confines, and which had the right to do so without giving up new privileges, is refused
// expect: refused "Landlock domain (1 of 16 layers)"
#include "landlock.h"

int main(void)
{
	int fd = no_directories();

	if (syscall(SYS_landlock_restrict_self, fd, 0) < 0)
		zoo_skip("no CAP_SYS_ADMIN");
	TRY(close(fd));
	CHECK_EQ(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), 0);
	zoo_ready();
	zoo_wait();
	CHECK(mkdir("directory", 0700) < 0 && errno == EACCES);
	zoo_pass();
}
