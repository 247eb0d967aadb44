// area: other namespaces
// shows: a task in a user namespace inside of the tree whose children are born into a pid namespace that belongs to
//   that, and that it has made (unshare -Up) but does not live in, before and after
// foreign: no CRIU keeps no user namespaces within the tree
#include "zoo.h"
#include <sched.h>

static void write_own(const char *path, const char *text)
{
	int fd = TRY(open(path, O_WRONLY));

	CHECK_EQ(write(fd, text, strlen(text)), (ssize_t)strlen(text));
	TRY(close(fd));
}

/* A child in the new namespace. Its first one ends last: that is the end of all others in there. */
static pid_t born(const char *name, int number, const char *last, int code)
{
	pid_t child = TRY(fork());

	if (child)
		return child;
	CHECK(number ? getpid() == number : getpid() > 2);
	CHECK_EQ(getppid(), 0);
	zoo_tell(name);
	zoo_wait();
	CHECK(number ? getpid() == number : getpid() > 2);
	CHECK_EQ(getppid(), 0);
	CHECK_EQ(getuid(), 0);
	zoo_await(last);
	_exit(code);
}

static void maker(void)
{
	pid_t first, second, third;
	char uids[64], gids[64];

	snprintf(uids, sizeof uids, "0 %d 1", geteuid());
	snprintf(gids, sizeof gids, "0 %d 1", getegid());
	TRY(unshare(CLONE_NEWUSER | CLONE_NEWPID));
	write_own("/proc/self/setgroups", "deny");
	write_own("/proc/self/uid_map", uids);
	write_own("/proc/self/gid_map", gids);
	first = born("first", 1, "others-gone", 4);
	zoo_await("first");
	second = born("second", 2, "third", 5);
	zoo_await("second");
	zoo_tell("maker");
	zoo_wait();
	third = born("third", 0, "third", 6);
	zoo_await("third");
	CHECK_EXIT(third, 6);
	CHECK_EXIT(second, 5);
	zoo_tell("others-gone");
	CHECK_EXIT(first, 4);
	_exit(3);
}

int main(void)
{
	pid_t child = TRY(fork());

	if (child == 0)
		maker();
	zoo_await("maker");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 3);
	zoo_pass();
}
