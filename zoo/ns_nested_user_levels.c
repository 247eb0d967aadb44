// area: other namespaces
// shows: two levels of user namespaces: nobody lives in the upper one any more, which owns the
//   others, and one below has a network of its own
// options: --external mnt[]
// foreign: no CRIU keeps no user namespaces within the tree
#include "zoo.h"
#include <linux/nsfs.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>

static void write_own(const char *path, const char *text)
{
	int fd = TRY(open(path, O_WRONLY));

	CHECK_EQ(write(fd, text, strlen(text)), (ssize_t)strlen(text));
	close(fd);
}

static void map_one(int inside, int outside)
{
	char text[64];

	snprintf(text, sizeof text, "%d %d 1", inside, outside);
	write_own("/proc/self/uid_map", text);
	write_own("/proc/self/gid_map", text);
}

/* Which user namespace a namespace of a task belongs to, or is below. */
static ino_t owner(pid_t pid, const char *name)
{
	struct stat stat;
	char path[64];
	int fd, user;

	snprintf(path, sizeof path, "/proc/%d/ns/%s", pid, name);
	fd = TRY(open(path, O_RDONLY));
	user = TRY(ioctl(fd, NS_GET_USERNS));
	TRY(fstat(user, &stat));
	close(fd);
	close(user);
	return stat.st_ino;
}

static ino_t own(pid_t pid)
{
	struct stat now;
	char path[64];

	snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
	TRY(stat(path, &now));
	return now.st_ino;
}

static int deepest(void)
{
	TRY(unshare(CLONE_NEWUSER | CLONE_NEWNET));
	zoo_tell("deepest");
	zoo_wait();
	CHECK_EQ(owner(getpid(), "net"), own(getpid()));
	CHECK_EQ(getpid(), 2);
	/* Its rights are over its network only. */
	close(TRY(socket(AF_INET, SOCK_RAW, 1)));
	CHECK(sethostname("no", 2) < 0);
	return 4;
}

static int inside(void *arg)
{
	pid_t child;

	zoo_await("born");
	write_own("/proc/self/setgroups", "deny");
	map_one(0, *(int *)arg);
	TRY(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL));
	TRY(mount("proc", "/proc", "proc", 0, NULL));
	/* As bubblewrap does for a user who is not to be root in there. */
	TRY(unshare(CLONE_NEWUSER));
	map_one(1000, 0);
	CHECK_EQ(getuid(), 1000);
	child = TRY(fork());
	if (child == 0)
		_exit(deepest());
	zoo_await("deepest");
	zoo_tell("inside");
	zoo_wait();
	CHECK_EQ(getuid(), 1000);
	CHECK_EQ(getgid(), 1000);
	CHECK_EQ(getpid(), 1);
	zoo_await("owners");
	CHECK(sethostname("no", 2) < 0);
	CHECK_EXIT(child, 4);
	return 3;
}

/* As the first task outside sees it: from inside what is above cannot be seen. */
static void check_owners(pid_t child)
{
	CHECK(owner(child, "user") != own(getpid()));
	CHECK(own(child) != owner(child, "user"));
	CHECK_EQ(owner(child, "pid"), owner(child, "user"));
	CHECK_EQ(owner(child, "mnt"), owner(child, "user"));
	CHECK_EQ(owner(child, "uts"), owner(child, "user"));
}

static char stack[65536] __attribute__((aligned(16)));

int main(void)
{
	int flags = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWUTS, id = (int)geteuid();
	pid_t child = TRY(clone(inside, stack + sizeof stack, flags | SIGCHLD, &id));

	zoo_tell("born");
	zoo_await("inside");
	check_owners(child);
	zoo_ready();
	zoo_wait();
	check_owners(child);
	zoo_tell("owners");
	CHECK_EXIT(child, 3);
	zoo_pass();
}
