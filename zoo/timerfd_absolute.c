// area: timers
// shows: a timerfd set to an absolute time, one that fires after the restore, and two descriptors on it
// foreign: yes
#include "zoo.h"
#include <sys/timerfd.h>

int main(void)
{
	int fd = TRY(timerfd_create(CLOCK_REALTIME, 0)), fires = TRY(timerfd_create(CLOCK_MONOTONIC, 0));
	struct itimerspec when = { 0 }, often = { { 0, 50000000 }, { 0, 50000000 } }, now;
	uint64_t ticks;
	int copy;

	TRY(clock_gettime(CLOCK_REALTIME, &when.it_value));
	when.it_value.tv_sec += 5000;
	TRY(timerfd_settime(fd, TFD_TIMER_ABSTIME, &when, NULL));
	TRY(timerfd_settime(fires, 0, &often, NULL));
	copy = TRY(dup(fires));
	zoo_ready();
	zoo_wait();
	TRY(timerfd_gettime(fd, &now));
	CHECK(now.it_value.tv_sec > 4400 && now.it_value.tv_sec <= 5000);
	for (int i = 0; i < 3; i++) {
		CHECK_EQ(read(i & 1 ? copy : fires, &ticks, 8), 8);
		CHECK(ticks >= 1);
	}
	zoo_pass();
}
