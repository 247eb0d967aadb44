// area: refusals
// shows: files in memory among the mounts that a user namespace has got as a copy of those above it, where they are locked to
//   what is mounted on them, are refused
// modes: plain
// options: --external mnt[]
// expect: refused "its content cannot be read; provide all mounts from outside with --external mnt[], or leave it out with --skip-mnt"
#include "zoo.h"
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>

static void write_own(const char *path, const char *text)
{
	int fd = TRY(open(path, O_WRONLY));

	CHECK_EQ(write(fd, text, strlen(text)), (ssize_t)strlen(text));
	TRY(close(fd));
}

int main(void)
{
	TRY(unshare(CLONE_NEWNS));
	TRY(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL));
	TRY(mkdir("upper", 0755));
	TRY(mount("upper", "upper", "tmpfs", 0, NULL));
	TRY(mkdir("upper/lower", 0755));
	TRY(mount("lower", "upper/lower", "tmpfs", 0, NULL));
	TRY(unshare(CLONE_NEWUSER | CLONE_NEWNS));
	write_own("/proc/self/setgroups", "deny");
	write_own("/proc/self/uid_map", "0 0 1");
	write_own("/proc/self/gid_map", "0 0 1");
	zoo_ready();
	zoo_wait();
	zoo_pass();
}
