// area: other namespaces
// shows: a user namespace without rights over the pid namespace that it is in: threads, a child, and a
//   child in a pid namespace of its own with a child
// modes: plain leave-running sealed
// foreign: no CRIU keeps no pid namespaces within the tree
#include "zoo.h"
#include <pthread.h>

static void map(const char *kind)
{
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/%s_map", getppid(), kind);
	int fd = TRY(open(path, O_WRONLY | O_CLOEXEC));

	TRY(write(fd, "0 0 1000", 8));
	close(fd);
}

static void *rest(void *arg)
{
	__atomic_store_n((pid_t *)arg, syscall(SYS_gettid), __ATOMIC_RELEASE);
	while (pause())
		;
	return NULL;
}

static void stay(const char *word, pid_t own)
{
	zoo_tell(word);
	zoo_wait();
	_exit(getpid() == own ? 7 : 8);
}

int main(void)
{
	pthread_t thread;
	pid_t child, first, inner, tid = 0;

	child = TRY(fork());
	if (child == 0) {
		zoo_await("unshared");
		map("uid");
		map("gid");
		_exit(0);
	}
	TRY(unshare(CLONE_NEWUSER));
	zoo_tell("unshared");
	CHECK_EXIT(child, 0);
	child = TRY(fork());
	if (child == 0)
		stay("child", getpid());
	first = TRY(syscall(SYS_clone, CLONE_NEWPID | SIGCHLD, 0, 0, 0, 0));
	if (first == 0) {
		inner = TRY(fork());
		if (inner == 0)
			stay("inner", 2);
		zoo_await("inner");
		zoo_tell("first");
		zoo_wait();
		CHECK_EXIT(inner, 7);
		_exit(getpid() == 1 ? 7 : 8);
	}
	CHECK_EQ(pthread_create(&thread, NULL, rest, &tid), 0);
	while (!__atomic_load_n(&tid, __ATOMIC_ACQUIRE))
		zoo_sleep_ms(1);
	zoo_await("child");
	zoo_await("first");
	zoo_ready();
	zoo_wait();
	TRY(syscall(SYS_tgkill, getpid(), tid, 0));
	CHECK_EXIT(child, 7);
	CHECK_EXIT(first, 7);
	zoo_pass();
}
