// area: signals
// shows: tasks inside of pause, sigsuspend, sigtimedwait and ppoll with a mask of their own
// foreign: yes
#include "zoo.h"
#include <poll.h>

static volatile sig_atomic_t got;

static void on_signal(int sig)
{
	got = sig;
}

static int waits(int kind)
{
	struct sigaction sa = { .sa_handler = on_signal };
	sigset_t all, open, now, pending;
	struct timespec long_time = { 1000, 0 };

	sigfillset(&all);
	TRY(sigprocmask(SIG_SETMASK, &all, NULL));
	TRY(sigaction(SIGUSR1, &sa, NULL));
	open = all;
	sigdelset(&open, SIGUSR1);
	switch (kind) {
	case 0:
		CHECK(sigsuspend(&open) < 0 && errno == EINTR);
		break;
	case 1:
		CHECK(ppoll(NULL, 0, NULL, &open) < 0 && errno == EINTR);
		break;
	case 2:
		/* sigtimedwait may come back early; the signal is then taken in the next round. */
		sigemptyset(&open);
		sigaddset(&open, SIGUSR1);
		while (sigtimedwait(&open, NULL, &long_time) < 0)
			CHECK_EQ(errno, EINTR);
		got = SIGUSR1;
		break;
	case 3:
		TRY(sigprocmask(SIG_SETMASK, &open, NULL));
		while (!got)
			pause();
		TRY(sigprocmask(SIG_SETMASK, &all, NULL));
	}
	CHECK_EQ(got, SIGUSR1);
	TRY(sigprocmask(SIG_BLOCK, NULL, &now));
	CHECK(sigismember(&now, SIGUSR1) && sigismember(&now, SIGTERM));
	TRY(sigpending(&pending));
	CHECK(!sigismember(&pending, SIGUSR1));
	return kind;
}

static bool sleeps(pid_t pid)
{
	char path[64];

	snprintf(path, sizeof path, "/proc/%d/stat", pid);
	return strstr(zoo_slurp(path), ") S ");
}

int main(void)
{
	pid_t pids[4];

	for (int i = 0; i < 4; i++)
		if (!(pids[i] = TRY(fork())))
			_exit(waits(i));
	zoo_sleep_ms(50);
	for (int i = 0; i < 4; i++)
		WAIT_UNTIL(sleeps(pids[i]));
	zoo_ready();
	zoo_wait();
	zoo_sleep_ms(50);
	for (int i = 0; i < 4; i++) {
		TRY(kill(pids[i], SIGUSR1));
		CHECK_EXIT(pids[i], i);
	}
	zoo_pass();
}
