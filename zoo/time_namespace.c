// area: other namespaces
// shows: a time namespace with offsets: its clocks go on from where they were
// modes: ns
// namespaces: time
#include "zoo.h"
#include <sys/timerfd.h>

int main(void)
{
	clockid_t clocks[] = { CLOCK_MONOTONIC, CLOCK_BOOTTIME };
	struct itimerspec hour = { .it_value = { 3600, 0 } }, left;
	struct timespec before[2], after;
	int fd = TRY(timerfd_create(CLOCK_MONOTONIC, 0));

	for (int i = 0; i < 2; i++)
		TRY(clock_gettime(clocks[i], &before[i]));
	CHECK(before[0].tv_sec > 86400);
	TRY(timerfd_settime(fd, 0, &hour, NULL));
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 2; i++) {
		TRY(clock_gettime(clocks[i], &after));
		CHECK(after.tv_sec >= before[i].tv_sec && after.tv_sec - before[i].tv_sec < 600);
	}
	TRY(timerfd_gettime(fd, &left));
	CHECK(left.it_value.tv_sec <= 3600 && left.it_value.tv_sec > 3000);
	zoo_pass();
}
