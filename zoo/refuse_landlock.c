// area: refusals
// shows: a set of landlock rules is refused
// expect: refused "landlock"
#include "zoo.h"
#include <linux/landlock.h>
#include <sys/prctl.h>

int main(void)
{
	struct landlock_ruleset_attr attr = { .handled_access_fs = LANDLOCK_ACCESS_FS_MAKE_DIR };
	int fd = (int)syscall(SYS_landlock_create_ruleset, &attr, sizeof attr, 0);

	if (fd < 0)
		zoo_skip("no landlock");
	zoo_ready();
	zoo_wait();
	TRY(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	TRY(syscall(SYS_landlock_restrict_self, fd, 0));
	CHECK(mkdir("directory", 0700) < 0 && errno == EACCES);
	zoo_pass();
}
