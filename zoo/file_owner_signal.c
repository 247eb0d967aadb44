// area: files
// shows: F_SETOWN, F_SETSIG and O_ASYNC: who is told of input, with which signal
// foreign: yes
#include "zoo.h"

int main(void)
{
	struct timespec limit = { 10, 0 };
	struct f_owner_ex owner = { F_OWNER_PID, getpid() }, now;
	int ends[2], group[2];
	siginfo_t info;
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGRTMIN + 1);
	TRY(sigprocmask(SIG_BLOCK, &set, NULL));
	TRY(pipe(ends));
	TRY(fcntl(ends[0], F_SETOWN_EX, &owner));
	TRY(fcntl(ends[0], F_SETSIG, SIGRTMIN + 1));
	TRY(fcntl(ends[0], F_SETFL, O_ASYNC | O_NONBLOCK));
	TRY(pipe(group));
	TRY(fcntl(group[0], F_SETOWN, -getpgrp()));
	zoo_ready();
	zoo_wait();
	TRY(fcntl(ends[0], F_GETOWN_EX, &now));
	CHECK_EQ(now.type, F_OWNER_PID);
	CHECK_EQ(now.pid, getpid());
	CHECK_EQ(fcntl(ends[0], F_GETSIG), SIGRTMIN + 1);
	CHECK_EQ(fcntl(ends[0], F_GETFL) & O_ASYNC, O_ASYNC);
	CHECK_EQ(fcntl(group[0], F_GETOWN), -getpgrp());
	/* No signal may have come from the restore itself. */
	CHECK(sigtimedwait(&set, &info, &(struct timespec){ 0 }) < 0);
	CHECK_EQ(write(ends[1], "x", 1), 1);
	CHECK_EQ(sigtimedwait(&set, &info, &limit), SIGRTMIN + 1);
	CHECK_EQ(info.si_fd, ends[0]);
	zoo_pass();
}
