// area: signals
// shows: handlers with their flags and masks, ignored signals and defaults, in a process and its child
// foreign: yes
#include "zoo.h"

static volatile sig_atomic_t last;

static void plain(int sig)
{
	last = sig;
}

static void with_info(int sig, siginfo_t *info, void *context)
{
	sigset_t now;

	(void)context;
	TRY(sigprocmask(SIG_BLOCK, NULL, &now));
	CHECK(sigismember(&now, SIGUSR2) && sigismember(&now, SIGRTMAX));
	last = sig + 100 * (info->si_code == SI_QUEUE);
}

int main(void)
{
	struct sigaction sa = { .sa_handler = plain, .sa_flags = SA_RESTART }, info, old;
	pid_t child;

	TRY(sigaction(SIGUSR1, &sa, NULL));
	sa.sa_flags = SA_RESETHAND | SA_NODEFER;
	TRY(sigaction(SIGTRAP, &sa, NULL));
	info = (struct sigaction){ .sa_sigaction = with_info, .sa_flags = SA_SIGINFO | SA_NOCLDSTOP };
	sigaddset(&info.sa_mask, SIGUSR2);
	sigaddset(&info.sa_mask, SIGRTMAX);
	TRY(sigaction(SIGRTMIN + 3, &info, NULL));
	CHECK(signal(SIGPIPE, SIG_IGN) != SIG_ERR);
	child = TRY(fork());
	if (child == 0)
		CHECK(signal(SIGUSR1, SIG_DFL) != SIG_ERR);
	if (child)
		zoo_await("child");
	else
		zoo_tell("child");
	if (child)
		zoo_ready();
	zoo_wait();
	TRY(sigaction(SIGUSR1, NULL, &old));
	CHECK(old.sa_handler == (child ? plain : SIG_DFL));
	TRY(sigaction(SIGPIPE, NULL, &old));
	CHECK(old.sa_handler == SIG_IGN);
	TRY(sigaction(SIGHUP, NULL, &old));
	CHECK(old.sa_handler == SIG_DFL);
	TRY(sigaction(SIGRTMIN + 3, NULL, &old));
	CHECK(old.sa_sigaction == with_info);
	CHECK_EQ(old.sa_flags & (SA_SIGINFO | SA_NOCLDSTOP), SA_SIGINFO | SA_NOCLDSTOP);
	sigqueue(getpid(), SIGRTMIN + 3, (union sigval){ .sival_int = 1 });
	CHECK_EQ(last, SIGRTMIN + 3 + 100);
	TRY(sigaction(SIGTRAP, NULL, &old));
	CHECK_EQ(old.sa_flags & (SA_RESETHAND | SA_NODEFER), SA_RESETHAND | SA_NODEFER);
	raise(SIGTRAP);
	CHECK_EQ(last, SIGTRAP);
	TRY(sigaction(SIGTRAP, NULL, &old));
	CHECK(old.sa_handler == SIG_DFL);
	if (child == 0)
		_exit(0);
	CHECK_EXIT(child, 0);
	zoo_pass();
}
