// area: timers
// shows: POSIX timers on three clocks: ids with holes, signal and value, time left, interval, overrun
// foreign: yes
// varies: ShdPnd SigPnd
#include "zoo.h"

#define TIMERS 9

int main(void)
{
	clockid_t clocks[] = { CLOCK_REALTIME, CLOCK_MONOTONIC, CLOCK_BOOTTIME };
	struct timespec poll = { 5, 0 };
	int ids[TIMERS];
	siginfo_t info;
	sigset_t set;

	sigemptyset(&set);
	for (int i = 0; i < TIMERS; i++)
		sigaddset(&set, SIGRTMIN + i);
	TRY(sigprocmask(SIG_BLOCK, &set, NULL));
	for (int i = 0; i < TIMERS; i++) {
		struct sigevent ev = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN + i };
		struct itimerspec when = { .it_value = { 1000 + i, 0 } };

		ev.sigev_value.sival_ptr = i % 3 ? (void *)(long)(0xabc0000 + i) : NULL;
		TRY(syscall(SYS_timer_create, clocks[i % 3], &ev, &ids[i]));
		if (i >= 6)
			when = (struct itimerspec){ { 0, 30000000 }, { 0, 30000000 } };
		if (i != 5)
			TRY(syscall(SYS_timer_settime, ids[i], 0, &when, NULL));
	}
	for (int i = 0; i < 2; i++)
		TRY(syscall(SYS_timer_delete, ids[i]));
	zoo_ready();
	zoo_wait();
	for (int i = 2; i < TIMERS; i++) {
		struct itimerspec left;

		TRY(syscall(SYS_timer_gettime, ids[i], &left));
		if (i == 5)
			CHECK(left.it_value.tv_sec == 0 && left.it_value.tv_nsec == 0);
		else if (i < 6)
			CHECK(left.it_value.tv_sec <= 1000 + i && left.it_value.tv_sec > 700);
		else
			CHECK_EQ(left.it_interval.tv_nsec, 30000000);
	}
	for (int i = 6; i < TIMERS; i++) {
		sigemptyset(&set);
		sigaddset(&set, SIGRTMIN + i);
		for (int round = 0; round < 2; round++) {
			CHECK_EQ(sigtimedwait(&set, &info, &poll), SIGRTMIN + i);
			CHECK_EQ(info.si_code, SI_TIMER);
			CHECK_EQ(info.si_timerid, ids[i]);
			CHECK(info.si_value.sival_ptr == (i % 3 ? (void *)(long)(0xabc0000 + i) : NULL));
		}
	}
	CHECK(syscall(SYS_timer_delete, ids[0]) < 0 && errno == EINVAL);
	zoo_pass();
}
