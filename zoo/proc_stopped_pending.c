// area: process tree
// shows: a stopped task with a blocked pending SIGTSTP and a handled pending SIGUSR1
// foreign: yes exit-code
#include "zoo.h"

static volatile sig_atomic_t got;

static void on_usr1(int sig)
{
	got = sig;
}

/* The form of others does not say whether the parent has been told of the stop (exit-code): it is told again. */
int main(void)
{
	pid_t child = TRY(fork());
	int status;

	if (child == 0) {
		struct sigaction sa = { .sa_handler = on_usr1 };
		sigset_t set, pending;

		sigemptyset(&set);
		sigaddset(&set, SIGTSTP);
		TRY(sigprocmask(SIG_BLOCK, &set, NULL));
		TRY(sigaction(SIGUSR1, &sa, NULL));
		raise(SIGTSTP);
		raise(SIGSTOP);
		TRY(sigpending(&pending));
		/* SIGCONT takes every pending stop signal away. */
		CHECK(!sigismember(&pending, SIGTSTP));
		CHECK_EQ(got, SIGUSR1);
		_exit(3);
	}
	TRY(waitpid(child, &status, WUNTRACED));
	TRY(kill(child, SIGUSR1));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(TRY(waitpid(child, &status, WNOHANG)), 0);
	TRY(kill(child, SIGCONT));
	CHECK_EXIT(child, 3);
	zoo_pass();
}
