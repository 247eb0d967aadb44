// area: process tree
// shows: an orphan adopted by init, and one that leads or has left a session
// modes: pidns ns userns
#include "zoo.h"

static void verify(const char *name)
{
	pid_t old[] = { getpid(), getppid(), getpgrp(), getsid(0) };

	CHECK_EQ(old[1], 1);
	zoo_tell(name);
	zoo_wait();
	CHECK_EQ(getpid(), old[0]);
	CHECK_EQ(getppid(), old[1]);
	CHECK_EQ(getpgrp(), old[2]);
	CHECK_EQ(getsid(0), old[3]);
	zoo_tell(name + 1);
	_exit(0);
}

static void orphan(const char *name, bool session, bool parent_session)
{
	pid_t parent = TRY(fork());

	if (parent) {
		CHECK_EXIT(parent, 0);
		return;
	}
	if (parent_session)
		TRY(setsid());
	parent = getpid();
	if (TRY(fork()) == 0) {
		if (session)
			TRY(setsid());
		WAIT_UNTIL(getppid() != parent);
		verify(name);
	}
	_exit(0);
}

int main(void)
{
	const char *names[] = { "1one", "2two", "3three", "4four" };

	for (int i = 0; i < 4; i++)
		orphan(names[i], i & 1, i & 2);
	for (int i = 0; i < 4; i++)
		zoo_await(names[i]);
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 4; i++)
		zoo_await(names[i] + 1);
	zoo_pass();
}
