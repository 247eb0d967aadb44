// area: process tree
// shows: a stop that the parent had its signal for is not signalled again
// foreign: yes
#include "zoo.h"

static volatile sig_atomic_t signals;

static void count(int signal)
{
	signals += signal == SIGCHLD;
}

int main(void)
{
	pid_t child;

	TRY(sigaction(SIGCHLD, &(struct sigaction){ .sa_handler = count }, NULL));
	child = TRY(fork());
	if (child == 0) {
		raise(SIGSTOP);
		_exit(12);
	}
	WAIT_UNTIL(signals == 1);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(signals, 1);
	TRY(kill(child, SIGCONT));
	CHECK_EXIT(child, 12);
	WAIT_UNTIL(signals > 1);
	zoo_pass();
}
