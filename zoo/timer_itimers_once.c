// area: timers
// shows: one-shot interval timers keep the time that is left
// foreign: yes
#include "zoo.h"
#include <sys/time.h>

int main(void)
{
	int kinds[] = { ITIMER_REAL, ITIMER_VIRTUAL, ITIMER_PROF };
	struct itimerval hour = { .it_value = { 3600, 0 } }, now;

	for (int i = 0; i < 3; i++)
		TRY(setitimer(kinds[i], &hour, NULL));
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 3; i++) {
		TRY(getitimer(kinds[i], &now));
		CHECK(now.it_value.tv_sec <= 3600 && now.it_value.tv_sec >= 3300);
		CHECK_EQ(now.it_interval.tv_sec, 0);
	}
	zoo_pass();
}
