// area: process tree
// shows: a stopped process of several threads: its parent hears nothing new, and all of it goes on
// foreign: yes
#include "zoo.h"
#include <pthread.h>

static volatile sig_atomic_t signals;
static volatile int running;

static void count(int signal)
{
	signals += signal == SIGCHLD;
}

static void *work(void *arg)
{
	(void)arg;
	__atomic_add_fetch(&running, 1, __ATOMIC_SEQ_CST);
	zoo_await("go");
	return NULL;
}

int main(void)
{
	pthread_t threads[3];
	siginfo_t info;
	pid_t child;

	TRY(sigaction(SIGCHLD, &(struct sigaction){ .sa_handler = count }, NULL));
	child = TRY(fork());
	if (child == 0) {
		for (int i = 0; i < 3; i++)
			CHECK(pthread_create(&threads[i], NULL, work, NULL) == 0);
		WAIT_UNTIL(running == 3);
		raise(SIGSTOP);
		for (int i = 0; i < 3; i++)
			CHECK(pthread_join(threads[i], NULL) == 0);
		_exit(12);
	}
	WAIT_UNTIL(signals == 1);
	zoo_ready();
	zoo_wait();
	zoo_sleep_ms(50);
	CHECK_EQ(signals, 1);
	/* It can still be asked for, once. */
	TRY(waitid(P_PID, child, &info, WSTOPPED | WNOHANG));
	CHECK_EQ(info.si_pid, child);
	CHECK_EQ(info.si_status, SIGSTOP);
	info.si_pid = 0;
	TRY(waitid(P_PID, child, &info, WSTOPPED | WNOHANG));
	CHECK_EQ(info.si_pid, 0);
	zoo_tell("go");
	TRY(kill(child, SIGCONT));
	CHECK_EXIT(child, 12);
	zoo_pass();
}
