// area: timers
// shows: the clocks never go back
// foreign: yes
#include "zoo.h"

int main(void)
{
	clockid_t clocks[] = { CLOCK_MONOTONIC, CLOCK_BOOTTIME, CLOCK_REALTIME };
	struct timespec before[3], after;

	for (int i = 0; i < 3; i++)
		TRY(clock_gettime(clocks[i], &before[i]));
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 3; i++) {
		TRY(clock_gettime(clocks[i], &after));
		CHECK(after.tv_sec > before[i].tv_sec ||
		      (after.tv_sec == before[i].tv_sec && after.tv_nsec >= before[i].tv_nsec));
		CHECK(after.tv_sec - before[i].tv_sec < 600);
	}
	zoo_pass();
}
