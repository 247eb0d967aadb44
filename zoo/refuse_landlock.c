// area: refusals
// shows: a landlock domain is refused: it can neither be read nor made anew
// expect: refused "landlock"
#include "zoo.h"
#include <linux/landlock.h>
#include <sys/prctl.h>

int main(void)
{
	struct landlock_ruleset_attr attr = { .handled_access_fs = LANDLOCK_ACCESS_FS_MAKE_CHAR };
	int fd = (int)syscall(SYS_landlock_create_ruleset, &attr, sizeof attr, 0);
	pid_t child;

	if (fd < 0)
		zoo_skip("no landlock");
	child = TRY(fork());
	if (child == 0) {
		TRY(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
		TRY(syscall(SYS_landlock_restrict_self, fd, 0));
		close(fd);
		zoo_tell("child");
		zoo_wait();
		_exit(mknod("device", S_IFCHR | 0600, 0x103) < 0 ? 5 : 6);
	}
	zoo_await("child");
	close(fd);
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 5);
	zoo_pass();
}
