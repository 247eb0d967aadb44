// area: timers
// shows: sleeping tasks sleep as long as they wanted: nanosleep that is told what is left, and clock_nanosleep to a time
// foreign: yes
#include "zoo.h"

int main(void)
{
	pid_t pids[2];
	struct timespec now, when;

	TRY(clock_gettime(CLOCK_MONOTONIC, &now));
	when = now;
	when.tv_sec += 2;
	for (int i = 0; i < 2; i++)
		if (!(pids[i] = TRY(fork()))) {
			struct timespec rest = { 2, 0 }, end;

			if (i == 0)
				while (nanosleep(&rest, &rest) && errno == EINTR)
					;
			else
				while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &when, NULL) == EINTR)
					;
			TRY(clock_gettime(CLOCK_MONOTONIC, &end));
			/* A task that comes late is to find it as it was while it slept. */
			zoo_wait();
			_exit(end.tv_sec - now.tv_sec < 2);
		}
	zoo_sleep_ms(20);
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(pids[0], 0);
	CHECK_EXIT(pids[1], 0);
	zoo_pass();
}
