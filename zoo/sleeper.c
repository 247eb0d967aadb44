// area: process tree
// shows: a task that sleeps in the kernel goes on, and still reacts to SIGTERM
// foreign: yes
#include "zoo.h"

static volatile sig_atomic_t terminated;

static void on_term(int sig)
{
	terminated = sig;
}

int main(void)
{
	struct sigaction sa = { .sa_handler = on_term };
	pid_t pid = getpid(), parent = getppid(), session = getsid(0), group = getpgrp();

	TRY(sigaction(SIGTERM, &sa, NULL));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(getpid(), pid);
	CHECK_EQ(getppid(), parent);
	CHECK_EQ(getsid(0), session);
	CHECK_EQ(getpgrp(), group);
	CHECK(!terminated);
	kill(pid, SIGTERM);
	CHECK_EQ(terminated, SIGTERM);
	zoo_pass();
}
