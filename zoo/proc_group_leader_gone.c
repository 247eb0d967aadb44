// area: process tree
// shows: a process group whose leader has been reaped lives on in its members
// foreign: yes
#include "zoo.h"

int main(void)
{
	pid_t leader = TRY(fork()), member;
	siginfo_t info;

	if (leader == 0) {
		TRY(setpgid(0, 0));
		zoo_tell("leader");
		zoo_await("joined");
		_exit(0);
	}
	zoo_await("leader");
	member = TRY(fork());
	if (member == 0) {
		TRY(setpgid(0, leader));
		zoo_tell("joined");
		zoo_wait();
		CHECK_EQ(getpgrp(), leader);
		_exit(3);
	}
	CHECK_EXIT(leader, 0);
	zoo_ready();
	zoo_wait();
	TRY(waitid(P_PGID, leader, &info, WEXITED));
	CHECK_EQ(info.si_pid, member);
	CHECK_EQ(info.si_status, 3);
	zoo_pass();
}
