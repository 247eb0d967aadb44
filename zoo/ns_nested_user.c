// area: other namespaces
// shows: user namespaces inside of the tree: one that maps its own id only, with a thread and a
//   child; one whose parent has mapped ranges, as another user without rights; one without maps
// build: -pthread
// foreign: no CRIU keeps no user namespaces within the tree
#include "zoo.h"
#include <grp.h>
#include <pthread.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>

/* What a task knows of its rights. */
struct self {
	char maps[2048], rights[2048];
	uid_t uid, euid, fsuid;
	gid_t gid, groups[64];
	int count, bits;
	pid_t pid;
};

static void append(char *text, size_t size, const char *path)
{
	size_t len = strlen(text);
	int fd = TRY(open(path, O_RDONLY));
	ssize_t got = TRY(read(fd, text + len, size - len - 1));

	text[len + (size_t)got] = 0;
	close(fd);
}

static struct self self(void)
{
	struct self me = { .uid = getuid(), .euid = geteuid(), .gid = getgid(), .pid = getpid() };
	char status[4096] = "", *line, *end;

	append(me.maps, sizeof me.maps, "/proc/self/uid_map");
	append(me.maps, sizeof me.maps, "/proc/self/gid_map");
	append(me.maps, sizeof me.maps, "/proc/self/setgroups");
	append(status, sizeof status, "/proc/self/status");
	line = strstr(status, "CapInh:");
	CHECK(line != NULL && (end = strstr(line, "Seccomp:")) != NULL);
	memcpy(me.rights, line, (size_t)(end - line));
	me.fsuid = (uid_t)setfsuid(-1);
	me.count = TRY(getgroups(64, me.groups));
	me.bits = TRY(prctl(PR_GET_SECUREBITS));
	return me;
}

/* The inode number of the user namespace of a task. */
static ino_t user_of(pid_t pid)
{
	struct stat stat_;
	char path[64];

	snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
	TRY(stat(path, &stat_));
	return stat_.st_ino;
}

static void stay(const char *name)
{
	struct self old = self(), now;

	zoo_tell(name);
	zoo_wait();
	now = self();
	CHECK(memcmp(&old, &now, sizeof old) == 0);
}

static void *thread(void *arg)
{
	pid_t tid = gettid();

	(void)arg;
	zoo_tell("thread");
	zoo_wait();
	CHECK_EQ(gettid(), tid);
	return (void *)user_of(getpid());
}

static void write_to(pid_t pid, const char *name, const char *text)
{
	char path[64];
	int fd;

	snprintf(path, sizeof path, "/proc/%d/%s", pid, name);
	fd = TRY(open(path, O_WRONLY));
	CHECK_EQ(write(fd, text, strlen(text)), (ssize_t)strlen(text));
	close(fd);
}

/* As unshare -Ur does it. */
static void maps_itself(void)
{
	char uids[64], gids[64];
	pthread_t other;
	void *of_thread;
	pid_t child;

	snprintf(uids, sizeof uids, "0 %d 1", geteuid());
	snprintf(gids, sizeof gids, "0 %d 1", getegid());
	TRY(unshare(CLONE_NEWUSER));
	write_to(getpid(), "setgroups", "deny");
	write_to(getpid(), "uid_map", uids);
	write_to(getpid(), "gid_map", gids);
	child = TRY(fork());
	if (child == 0) {
		stay("child");
		CHECK_EQ(user_of(getpid()), user_of(getppid()));
		_exit(4);
	}
	CHECK_EQ(pthread_create(&other, NULL, thread, NULL), 0);
	zoo_await("child");
	zoo_await("thread");
	stay("itself");
	CHECK_EQ(pthread_join(other, &of_thread), 0);
	CHECK_EQ((ino_t)of_thread, user_of(getpid()));
	CHECK_EXIT(child, 4);
	/* All rights in there, and none outside. */
	TRY(unshare(CLONE_NEWUTS));
	TRY(sethostname("inside", 6));
	CHECK(setgroups(0, NULL) < 0 && errno == EPERM);
	_exit(3);
}

static void mapped_by_parent(void)
{
	TRY(unshare(CLONE_NEWUSER));
	zoo_tell("unshared");
	zoo_await("mapped");
	TRY(setgroups(2, (gid_t[]){ 1, 2 }));
	TRY(setresgid(3, 3, 3));
	TRY(prctl(PR_SET_SECUREBITS, 1 << 2));
	TRY(setresuid(1, 2, 5));
	TRY(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	TRY(prctl(PR_CAPBSET_DROP, 21, 0, 0, 0));
	stay("ranges");
	TRY(setresuid(5, 5, 5));
	_exit(5);
}

static void without_maps(void)
{
	TRY(unshare(CLONE_NEWUSER));
	CHECK(getuid() == 65534);
	stay("none");
	CHECK(setresuid(0, 0, 0) < 0 && errno == EINVAL);
	_exit(6);
}

static pid_t ranges, none;

int main(void)
{
	pid_t itself;

	TRY(chmod(".", 0777));
	itself = TRY(fork());
	if (itself == 0)
		maps_itself();
	ranges = TRY(fork());
	if (ranges == 0)
		mapped_by_parent();
	zoo_await("unshared");
	write_to(ranges, "uid_map", "0 10 4\n4 20 3\n");
	write_to(ranges, "gid_map", "0 30 8\n");
	zoo_tell("mapped");
	none = TRY(fork());
	if (none == 0)
		without_maps();
	zoo_await("itself");
	zoo_await("ranges");
	zoo_await("none");
	zoo_ready();
	zoo_wait();
	CHECK(user_of(itself) != user_of(getpid()));
	CHECK(user_of(itself) != user_of(none));
	CHECK_EXIT(itself, 3);
	CHECK_EXIT(ranges, 5);
	CHECK_EXIT(none, 6);
	zoo_pass();
}
