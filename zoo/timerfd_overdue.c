// area: timers
// shows: a periodic timerfd that has fired and was not read yet goes on firing
// foreign: yes
#include "zoo.h"
#include <sys/timerfd.h>

int main(void)
{
	struct itimerspec often = { { 0, 20000000 }, { 0, 20000000 } };
	int fd = TRY(timerfd_create(CLOCK_MONOTONIC, 0));
	uint64_t ticks;

	TRY(timerfd_settime(fd, 0, &often, NULL));
	/* Once it has fired the kernel shows no time left until the next read. */
	zoo_sleep_ms(50);
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 3; i++) {
		CHECK_EQ(read(fd, &ticks, 8), 8);
		CHECK(ticks >= 1);
	}
	zoo_pass();
}
