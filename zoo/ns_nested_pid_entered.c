// area: other namespaces
// shows: tasks that were born into pid namespaces of the tree which their parents have entered
//   (setns(2), as nsenter and "docker exec" do): one and two levels below, before the tasks that have
//   made these in the order of the tree, in sessions of their own, and adopted by another parent
// modes: plain leave-running rounds pidns ns userns
// foreign: no CRIU keeps no pid namespaces within the tree
#include "zoo.h"
#include <sys/prctl.h>

static void tell_pid(const char *name, pid_t pid)
{
	char text[16];

	snprintf(text, sizeof text, "%d", pid);
	zoo_write(name, text);
}

static pid_t told_pid(const char *name)
{
	char text[16] = "";
	int fd;

	zoo_await(name);
	fd = TRY(open(zoo_path(name), O_RDONLY));
	TRY(read(fd, text, sizeof text - 1));
	TRY(close(fd));
	return atoi(text);
}

/* Has children be born where the child of "name" lives. */
static void enter(const char *name)
{
	char path[64];

	snprintf(path, sizeof path, "/proc/%d/ns/pid_for_children", told_pid(name));
	zoo_enter_pid(path);
}

/* In a namespace that was entered: nobody sees the parent, nor the group. */
static void live(const char *name, int number, int leads, int code)
{
	if (leads)
		CHECK_EQ(setsid(), number);
	zoo_tell(name);
	zoo_wait();
	if (number)
		CHECK_EQ(getpid(), number);
	CHECK_EQ(getppid(), 0);
	CHECK_EQ(getsid(0), leads ? number : 0);
	CHECK_EQ(getpgrp(), leads ? number : 0);
	TRY(kill(1, 0));
	_exit(code);
}

/* A task that lives in the outermost namespace, and bears others in that of "name". */
static pid_t visitor(const char *name, const char *says, int number, int leads)
{
	pid_t visitor = TRY(fork()), child;

	if (visitor)
		return visitor;
	enter(name);
	child = TRY(fork());
	if (!child)
		live(says, number, leads, 4);
	zoo_await(says);
	zoo_wait();
	CHECK_EXIT(child, 4);
	child = TRY(fork());
	if (!child)
		live(says, 0, 0, 5);
	CHECK_EXIT(child, 5);
	_exit(6);
}

static void inner(void)
{
	pid_t last;

	TRY(unshare(CLONE_NEWPID));
	last = TRY(fork());
	if (!last) {
		zoo_tell("inner");
		zoo_wait();
		zoo_await("gone");
		_exit(7);
	}
	zoo_wait();
	CHECK_EXIT(last, 7);
	_exit(8);
}

int main(void)
{
	pid_t early, maker, first, deep, late, between;
	int status;

	TRY(prctl(PR_SET_CHILD_SUBREAPER, 1));
	early = visitor("outer-made", "early", 3, 0);
	maker = TRY(fork());
	if (!maker) {
		TRY(unshare(CLONE_NEWPID));
		first = TRY(fork());
		if (!first)
			inner();
		zoo_await("inner");
		tell_pid("outer-made", getpid());
		tell_pid("inner-made", first);
		zoo_wait();
		CHECK_EXIT(first, 8);
		_exit(9);
	}
	zoo_await("early");
	deep = visitor("inner-made", "deep", 2, 0);
	zoo_await("deep");
	/* Numbers in the outer one: the first of both, early, and the visitor of the inner one. */
	late = visitor("outer-made", "late", 5, 1);
	zoo_await("late");
	between = TRY(fork());
	if (!between) {
		enter("outer-made");
		if (!TRY(fork()))
			live("orphan", 6, 0, 10);
		_exit(0);
	}
	CHECK_EXIT(between, 0);
	zoo_await("orphan");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(early, 6);
	CHECK_EXIT(deep, 6);
	CHECK_EXIT(late, 6);
	TRY(wait(&status));
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 10);
	zoo_tell("gone");
	CHECK_EXIT(maker, 9);
	zoo_pass();
}
