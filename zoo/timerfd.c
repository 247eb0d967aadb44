// area: timers
// shows: timerfds: clock, flags, pending ticks, time left and interval
// foreign: yes
#include "zoo.h"
#include <sys/timerfd.h>

int main(void)
{
	int clocks[] = { CLOCK_REALTIME, CLOCK_MONOTONIC, CLOCK_BOOTTIME }, fds[3], ticked, idle;
	struct itimerspec hour = { { 60, 5 }, { 3600, 0 } }, soon = { { 0, 0 }, { 0, 1000000 } }, now;
	uint64_t ticks;

	for (int i = 0; i < 3; i++) {
		fds[i] = TRY(timerfd_create(clocks[i], i & 1 ? TFD_NONBLOCK : TFD_CLOEXEC));
		TRY(timerfd_settime(fds[i], 0, &hour, NULL));
	}
	ticked = TRY(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK));
	TRY(timerfd_settime(ticked, 0, &soon, NULL));
	idle = TRY(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK));
	do
		TRY(timerfd_gettime(ticked, &now));
	while (now.it_value.tv_nsec);
	zoo_sleep_ms(5);
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 3; i++) {
		TRY(timerfd_gettime(fds[i], &now));
		CHECK(now.it_value.tv_sec <= 3600 && now.it_value.tv_sec > 3300);
		CHECK_EQ(now.it_interval.tv_sec, 60);
		CHECK_EQ(now.it_interval.tv_nsec, 5);
		CHECK_EQ(fcntl(fds[i], F_GETFL) & O_NONBLOCK, i & 1 ? O_NONBLOCK : 0);
		CHECK_EQ(fcntl(fds[i], F_GETFD), i & 1 ? 0 : FD_CLOEXEC);
	}
	CHECK_EQ(read(ticked, &ticks, 8), 8);
	CHECK_EQ(ticks, 1);
	CHECK(read(ticked, &ticks, 8) < 0 && errno == EAGAIN);
	CHECK(read(idle, &ticks, 8) < 0 && errno == EAGAIN);
	zoo_pass();
}
