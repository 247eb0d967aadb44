// area: refusals
// shows: a user namespace that has given up setgroups(2) is refused with --strict
// modes: plain leave-running
// dump: --strict
// expect: refused "its user namespace denies setgroups"
#include "zoo.h"

static void give(const char *file, const char *line)
{
	int fd = TRY(open(file, O_WRONLY | O_CLOEXEC));

	TRY(write(fd, line, strlen(line)));
	close(fd);
}

int main(void)
{
	TRY(unshare(CLONE_NEWUSER));
	give("/proc/self/setgroups", "deny");
	give("/proc/self/uid_map", "0 0 1");
	give("/proc/self/gid_map", "0 0 1");
	zoo_ready();
	zoo_wait();
	zoo_pass();
}
