// area: process tree
// shows: a zombie that leads a session and a group with living members
// foreign: yes
#include "zoo.h"

int main(void)
{
	pid_t leader = TRY(fork()), member = 0;
	siginfo_t info;

	if (leader == 0) {
		TRY(setsid());
		/* The member is our sibling: it stays a child of the main process. */
		member = (pid_t)TRY(syscall(SYS_clone, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0));
		if (member == 0) {
			zoo_tell("member");
			zoo_wait();
			CHECK_EQ(getsid(0), getpgrp());
			CHECK(getsid(0) != getpid());
			_exit(5);
		}
		_exit(7);
	}
	zoo_await("member");
	TRY(waitid(P_PID, leader, &info, WEXITED | WNOWAIT));
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(leader, 7);
	CHECK(WEXITSTATUS(({ int s; TRY(wait(&s)); s; })) == 5);
	zoo_pass();
}
