// area: other namespaces
// shows: two levels of pid namespaces, each with a mount namespace and a procfs of its own, parts of
//   which are mounted read-only on it, one of them shared
// modes: pidns ns userns
#include "zoo.h"
#include <sys/mount.h>
#include <sys/statvfs.h>

static void own_proc(void)
{
	TRY(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL));
	TRY(mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL));
	TRY(mount("/proc/sys", "/proc/sys", NULL, MS_BIND, NULL));
	TRY(mount(NULL, "/proc/sys", NULL, MS_BIND | MS_REMOUNT | MS_RDONLY, NULL));
	TRY(mount("tmpfs", "/proc/driver", "tmpfs", 0, NULL));
}

/* That /proc shows this namespace, and that what lies on it is there. */
static void check_proc(int highest)
{
	char name[64], link[64] = "";
	struct statvfs sys;

	CHECK(readlink("/proc/self", link, sizeof link - 1) > 0);
	snprintf(name, sizeof name, "%d", getpid());
	CHECK(strcmp(link, name) == 0);
	snprintf(name, sizeof name, "/proc/%d", highest);
	TRY(access(name, F_OK));
	snprintf(name, sizeof name, "/proc/%d", highest + 1);
	CHECK(access(name, F_OK) < 0);
	TRY(statvfs("/proc/sys", &sys));
	CHECK(sys.f_flag & ST_RDONLY);
	TRY(access("/proc/driver/mark", F_OK));
}

static void mark(void)
{
	close(TRY(open("/proc/driver/mark", O_CREAT | O_RDWR, 0600)));
}

static char stack[2][65536] __attribute__((aligned(16)));

static int deepest(void *arg)
{
	(void)arg;
	CHECK_EQ(getpid(), 1);
	own_proc();
	mark();
	/* What lies on it already is not. */
	TRY(mount(NULL, "/proc", NULL, MS_SHARED, NULL));
	if (TRY(fork()) == 0) {
		CHECK_EQ(getpid(), 2);
		zoo_tell("deepest-child");
		zoo_wait();
		CHECK_EQ(getpid(), 2);
		CHECK_EQ(getppid(), 1);
		check_proc(2);
		zoo_await("read");
		_exit(2);
	}
	zoo_await("deepest-child");
	check_proc(2);
	zoo_tell("deepest");
	zoo_wait();
	CHECK_EQ(getpid(), 1);
	CHECK_EQ(getppid(), 0);
	CHECK_EXIT(2, 2);
	check_proc(1);
	return 3;
}

static int inner(void *arg)
{
	char text[256] = "";
	int status, self;
	pid_t child;

	(void)arg;
	own_proc();
	mark();
	child = TRY(clone(deepest, stack[1] + sizeof stack[1], CLONE_NEWPID | CLONE_NEWNS | SIGCHLD,
			  NULL));
	CHECK_EQ(child, 2);
	zoo_await("deepest");
	/* Its own, and the deepest task of all as it is known here. */
	self = TRY(open("/proc/self/comm", O_RDONLY));
	status = TRY(open("/proc/3/status", O_RDONLY));
	check_proc(3);
	zoo_tell("inner");
	zoo_wait();
	check_proc(3);
	CHECK(pread(self, text, sizeof text - 1, 0) > 0);
	CHECK(pread(status, text, sizeof text - 1, 0) > 0);
	zoo_tell("read");
	CHECK_EXIT(child, 3);
	check_proc(1);
	return 4;
}

int main(void)
{
	pid_t child = TRY(clone(inner, stack[0] + sizeof stack[0], CLONE_NEWPID | CLONE_NEWNS | SIGCHLD,
				NULL));

	zoo_await("inner");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 4);
	zoo_pass();
}
