// area: other namespaces
// shows: a sandbox as bubblewrap makes it: a user namespace with pid, mount, network, IPC, UTS and
//   cgroup namespaces that belong to it, whose first task leads a session, a child and a thread
// options: --external mnt[]
// build: -pthread
// foreign: no CRIU keeps no user namespaces within the tree
#include "zoo.h"
#include <linux/nsfs.h>
#include <pthread.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>

#ifndef CLONE_NEWCGROUP
#define CLONE_NEWCGROUP 0x2000000
#endif

static void write_own(const char *path, const char *text)
{
	int fd = TRY(open(path, O_WRONLY));

	CHECK_EQ(write(fd, text, strlen(text)), (ssize_t)strlen(text));
	close(fd);
}

/* Whether all namespaces belong to the user namespace that this task lives in. */
static void check_owners(void)
{
	const char *names[] = { "pid", "mnt", "net", "ipc", "uts", "cgroup" };
	struct stat own, owner;
	char path[64];

	TRY(stat("/proc/self/ns/user", &own));
	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		int fd, user;

		snprintf(path, sizeof path, "/proc/self/ns/%s", names[i]);
		fd = TRY(open(path, O_RDONLY));
		user = TRY(ioctl(fd, NS_GET_USERNS));
		TRY(fstat(user, &owner));
		close(fd);
		close(user);
		CHECK_EQ(owner.st_ino, own.st_ino);
	}
}

static void *thread(void *arg)
{
	pid_t tid = gettid();

	(void)arg;
	zoo_tell("thread");
	zoo_wait();
	CHECK_EQ(gettid(), tid);
	return NULL;
}

static int inside(void *arg)
{
	char maps[2][64], shown[64] = "";
	pthread_t other;
	pid_t child;
	int fd;

	(void)arg;
	zoo_await("born");
	snprintf(maps[0], sizeof maps[0], "0 %s 1", (char *)arg);
	write_own("/proc/self/setgroups", "deny");
	write_own("/proc/self/uid_map", maps[0]);
	write_own("/proc/self/gid_map", maps[0]);
	TRY(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL));
	TRY(mount("proc", "/proc", "proc", 0, NULL));
	TRY(sethostname("sandbox", 7));
	TRY(setsid());
	CHECK_EQ(getpid(), 1);
	check_owners();
	child = TRY(fork());
	if (child == 0) {
		CHECK_EQ(getpid(), 2);
		zoo_tell("child");
		zoo_wait();
		CHECK_EQ(getpid(), 2);
		CHECK_EQ(getppid(), 1);
		CHECK_EQ(getsid(0), 1);
		_exit(4);
	}
	CHECK_EQ(pthread_create(&other, NULL, thread, NULL), 0);
	zoo_await("child");
	zoo_await("thread");
	zoo_tell("inside");
	zoo_wait();
	CHECK_EQ(getpid(), 1);
	CHECK_EQ(getsid(0), 1);
	CHECK_EQ(getuid(), 0);
	check_owners();
	CHECK(readlink("/proc/self", shown, sizeof shown - 1) > 0);
	CHECK(strcmp(shown, "1") == 0);
	/* What the owner may do. */
	TRY(sethostname("again", 5));
	TRY(mount("tmpfs", "/proc/driver", "tmpfs", 0, NULL));
	fd = TRY(socket(AF_INET, SOCK_RAW, 1));
	close(fd);
	CHECK_EQ(pthread_join(other, NULL), 0);
	CHECK_EXIT(child, 4);
	child = TRY(fork());
	if (child == 0)
		_exit(getppid() == 1 ? 5 : 0);
	CHECK_EXIT(child, 5);
	return 3;
}

static char stack[65536] __attribute__((aligned(16)));

int main(void)
{
	int flags = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC |
		    CLONE_NEWUTS | CLONE_NEWCGROUP;
	char id[16];
	pid_t child;

	snprintf(id, sizeof id, "%d", geteuid());
	child = TRY(clone(inside, stack + sizeof stack, flags | SIGCHLD, id));
	zoo_tell("born");
	zoo_await("inside");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 3);
	zoo_pass();
}
