// area: signals
// shows: pending signals sent by kill, tgkill, a timer's end, and a child's death
// foreign: yes
#include "zoo.h"
#include <sys/time.h>

static int take(int sig, pid_t pid)
{
	struct timespec now = { 0 };
	siginfo_t info;
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, sig);
	CHECK_EQ(sigtimedwait(&set, &info, &now), sig);
	if (pid)
		CHECK_EQ(info.si_pid, pid);
	return info.si_code;
}

int main(void)
{
	struct itimerval soon = { .it_value = { 0, 1000 } };
	sigset_t set, pending;
	int tgkill_code;
	pid_t child;

	sigfillset(&set);
	TRY(sigprocmask(SIG_BLOCK, &set, NULL));
	/* Kernels differ in the code that they give to tgkill. */
	TRY(syscall(SYS_tgkill, getpid(), getpid(), SIGUSR2));
	tgkill_code = take(SIGUSR2, getpid());
	TRY(kill(getpid(), SIGTERM));
	TRY(syscall(SYS_tgkill, getpid(), getpid(), SIGUSR2));
	TRY(setitimer(ITIMER_REAL, &soon, NULL));
	child = TRY(fork());
	if (child == 0)
		_exit(9);
	do
		TRY(sigpending(&pending));
	while (!sigismember(&pending, SIGALRM) || !sigismember(&pending, SIGCHLD));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(take(SIGTERM, getpid()), SI_USER);
	CHECK_EQ(take(SIGUSR2, getpid()), tgkill_code);
	CHECK_EQ(take(SIGALRM, 0), SI_KERNEL);
	CHECK_EQ(take(SIGCHLD, child), CLD_EXITED);
	CHECK_EXIT(child, 9);
	TRY(sigpending(&pending));
	CHECK(sigisemptyset(&pending));
	zoo_pass();
}
