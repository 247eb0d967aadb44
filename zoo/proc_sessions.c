// area: process tree
// shows: sessions and process groups: an own leader, a plain child, a child left in the old session,
//   orphans
// foreign: yes
#include "zoo.h"

enum { PLAIN, OWN_GROUP, JOINED_GROUP, OWN_SESSION, CHILD_OF_SESSION, KINDS };

struct seen {
	pid_t pid, parent, group, session;
};

static void verify(const char *name)
{
	struct seen old = { getpid(), getppid(), getpgrp(), getsid(0) };

	zoo_tell(name);
	zoo_wait();
	CHECK_EQ(getpid(), old.pid);
	CHECK_EQ(getppid(), old.parent);
	CHECK_EQ(getpgrp(), old.group);
	CHECK_EQ(getsid(0), old.session);
}

int main(void)
{
	pid_t pids[4];

	if (!(pids[0] = TRY(fork()))) {
		verify("plain");
		_exit(0);
	}
	if (!(pids[1] = TRY(fork()))) {
		TRY(setpgid(0, 0));
		verify("group");
		_exit(0);
	}
	zoo_await("group");
	if (!(pids[2] = TRY(fork()))) {
		TRY(setpgid(0, pids[1]));
		verify("joined");
		_exit(0);
	}
	if (!(pids[3] = TRY(fork()))) {
		/* The first grandchild stays in the old session, the second lives in the new one. */
		pid_t left = TRY(fork()), taken;

		if (left == 0) {
			zoo_await("moved");
			verify("left");
			_exit(0);
		}
		TRY(setsid());
		zoo_tell("moved");
		taken = TRY(fork());
		if (taken == 0) {
			verify("taken");
			_exit(0);
		}
		verify("session");
		CHECK_EXIT(left, 0);
		CHECK_EXIT(taken, 0);
		_exit(0);
	}
	zoo_await("plain");
	zoo_await("joined");
	zoo_await("session");
	zoo_await("left");
	zoo_await("taken");
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 4; i++)
		CHECK_EXIT(pids[i], 0);
	zoo_pass();
}
