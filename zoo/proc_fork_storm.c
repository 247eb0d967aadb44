// area: process tree
// shows: a tree that forks and exits all the time is frozen as a whole: none of ten tokens is lost
// foreign: yes
// varies: stat status file link timers thread threads maps fds fd namespace pid
#include "zoo.h"
#include <sys/prctl.h>

#define TOKENS 10

/* A process that holds a token forks a successor that carries it on, and exits. */
static void carry(int token)
{
	for (;;) {
		pid_t next = TRY(fork());

		if (next)
			_exit(0);
		if (zoo_go()) {
			char name[16];

			snprintf(name, sizeof name, "token%d", token);
			if (mkdir(zoo_path(name), 0700))
				zoo_fail("token %d was doubled", token);
			_exit(0);
		}
	}
}

int main(void)
{
	/* Orphans come to us, and are reaped by themselves. */
	TRY(prctl(PR_SET_CHILD_SUBREAPER, 1));
	CHECK(signal(SIGCHLD, SIG_IGN) != SIG_ERR);
	for (int token = 0; token < TOKENS; token++)
		if (TRY(fork()) == 0)
			carry(token);
	zoo_sleep_ms(50);
	zoo_ready();
	zoo_wait();
	for (int token = 0; token < TOKENS; token++) {
		char name[16];

		snprintf(name, sizeof name, "token%d", token);
		zoo_await(name);
	}
	zoo_pass();
}
