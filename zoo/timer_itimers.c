// area: timers
// shows: periodic interval timers (real, virtual, profiling) keep firing
// foreign: yes
// varies: ShdPnd
#include "zoo.h"
#include <sys/time.h>

static volatile sig_atomic_t fired[3];

static void on_signal(int sig)
{
	fired[sig == SIGALRM ? 0 : sig == SIGVTALRM ? 1 : 2]++;
}

int main(void)
{
	struct sigaction sa = { .sa_handler = on_signal, .sa_flags = SA_RESTART };
	int kinds[] = { ITIMER_REAL, ITIMER_VIRTUAL, ITIMER_PROF }, sigs[] = { SIGALRM, SIGVTALRM, SIGPROF };
	struct itimerval often = { { 0, 20000 }, { 0, 20000 } }, now;

	for (int i = 0; i < 3; i++) {
		TRY(sigaction(sigs[i], &sa, NULL));
		TRY(setitimer(kinds[i], &often, NULL));
	}
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 3; i++) {
		int seen = fired[i];

		TRY(getitimer(kinds[i], &now));
		CHECK_EQ(now.it_interval.tv_usec / 4000, 5);
		while (fired[i] < seen + 3)
			;
	}
	zoo_pass();
}
