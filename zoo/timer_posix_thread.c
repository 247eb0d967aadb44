// area: timers
// shows: POSIX timers that signal a thread, that notify nobody, and that count processor time
// foreign: yes
// varies: SigPnd
#include "zoo.h"
#include <pthread.h>

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

static int timer;

static void *work(void *arg)
{
	struct sigevent ev = { .sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGRTMIN };
	struct itimerspec often = { { 0, 20000000 }, { 0, 20000000 } };
	struct timespec limit = { 10, 0 };
	siginfo_t info;
	sigset_t set;

	ev.sigev_notify_thread_id = (pid_t)syscall(SYS_gettid);
	TRY(syscall(SYS_timer_create, CLOCK_MONOTONIC, &ev, &timer));
	TRY(syscall(SYS_timer_settime, timer, 0, &often, NULL));
	zoo_tell("thread");
	zoo_wait();
	sigemptyset(&set);
	sigaddset(&set, SIGRTMIN);
	for (int i = 0; i < 3; i++) {
		CHECK_EQ(sigtimedwait(&set, &info, &limit), SIGRTMIN);
		CHECK_EQ(info.si_timerid, timer);
	}
	return arg;
}

int main(void)
{
	struct sigevent none = { .sigev_notify = SIGEV_NONE };
	struct itimerspec hour = { .it_value = { 3600, 0 } }, left;
	int silent, cpu;
	pthread_t thread;
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGRTMIN);
	TRY(sigprocmask(SIG_BLOCK, &set, NULL));
	TRY(syscall(SYS_timer_create, CLOCK_MONOTONIC, &none, &silent));
	TRY(syscall(SYS_timer_settime, silent, 0, &hour, NULL));
	TRY(syscall(SYS_timer_create, CLOCK_PROCESS_CPUTIME_ID, &none, &cpu));
	TRY(syscall(SYS_timer_settime, cpu, 0, &hour, NULL));
	CHECK(pthread_create(&thread, NULL, work, NULL) == 0);
	zoo_await("thread");
	zoo_ready();
	zoo_wait();
	CHECK(pthread_join(thread, NULL) == 0);
	TRY(syscall(SYS_timer_gettime, silent, &left));
	CHECK(left.it_value.tv_sec > 3000);
	TRY(syscall(SYS_timer_gettime, cpu, &left));
	CHECK(left.it_value.tv_sec > 3000);
	zoo_pass();
}
