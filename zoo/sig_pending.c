// area: signals
// shows: pending signals, of the process and of threads, in order and with their payload
// foreign: yes
#include "zoo.h"
#include <pthread.h>

#define OWN 64

static volatile bool thread_ready;

static void queue(pid_t pid, pid_t tid, int sig, int code, int value)
{
	siginfo_t info = { 0 };

	info.si_signo = sig;
	info.si_code = code;
	info.si_pid = 4711;
	info.si_uid = 12;
	info.si_value.sival_int = value;
	if (tid)
		TRY(syscall(SYS_rt_tgsigqueueinfo, pid, tid, sig, &info));
	else
		TRY(syscall(SYS_rt_sigqueueinfo, pid, sig, &info));
}

static void expect(int sig, int code, int value)
{
	struct timespec now = { 0 };
	siginfo_t info;
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, sig);
	CHECK_EQ(sigtimedwait(&set, &info, &now), sig);
	CHECK_EQ(info.si_code, code);
	CHECK_EQ(info.si_value.sival_int, value);
	CHECK_EQ(info.si_pid, 4711);
	CHECK_EQ(info.si_uid, 12);
}

static void none_left(int sig)
{
	struct timespec now = { 0 };
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, sig);
	CHECK(sigtimedwait(&set, NULL, &now) < 0 && errno == EAGAIN);
}

static void *work(void *arg)
{
	pid_t tid = (pid_t)syscall(SYS_gettid);

	for (int i = 0; i < 3; i++)
		queue(getpid(), tid, SIGRTMIN + 5, -40, 1000 + i);
	thread_ready = true;
	zoo_wait();
	for (int i = 0; i < 3; i++)
		expect(SIGRTMIN + 5, -40, 1000 + i);
	none_left(SIGRTMIN + 5);
	return arg;
}

int main(void)
{
	pthread_t thread;
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	sigaddset(&set, SIGCHLD);
	for (int sig = SIGRTMIN; sig <= SIGRTMAX; sig++)
		sigaddset(&set, sig);
	TRY(sigprocmask(SIG_BLOCK, &set, NULL));
	for (int i = 0; i < 2; i++)
		queue(getpid(), 0, SIGRTMIN + 1, -33, i);
	queue(getpid(), 0, SIGCHLD, -34, 99);
	queue(getpid(), 0, SIGUSR1, SI_QUEUE, 7);
	for (int i = 0; i < OWN; i++)
		queue(getpid(), getpid(), SIGRTMIN + i % 3 + 2, -36, i);
	CHECK(pthread_create(&thread, NULL, work, NULL) == 0);
	WAIT_UNTIL(thread_ready);
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 2; i++)
		expect(SIGRTMIN + 1, -33, i);
	expect(SIGCHLD, -34, 99);
	expect(SIGUSR1, SI_QUEUE, 7);
	for (int k = 0; k < 3; k++)
		for (int i = k; i < OWN; i += 3)
			expect(SIGRTMIN + k + 2, -36, i);
	for (int sig = SIGRTMIN; sig < SIGRTMIN + 5; sig++)
		none_left(sig);
	CHECK(pthread_join(thread, NULL) == 0);
	zoo_pass();
}
