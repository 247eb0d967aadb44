// area: process tree
// shows: zombies keep their exit status, be it a code or a signal
// foreign: yes
#include "zoo.h"
#include <sys/resource.h>

int main(void)
{
	pid_t pids[4];
	int signals[] = { 0, 0, SIGKILL, SIGSEGV };

	for (int i = 0; i < 4; i++) {
		pids[i] = TRY(fork());
		if (pids[i])
			continue;
		if (signals[i]) {
			struct rlimit none = { 0, 0 };

			setrlimit(RLIMIT_CORE, &none);
			raise(signals[i]);
		}
		_exit(i * 3);
	}
	for (int i = 0; i < 4; i++) {
		siginfo_t info;

		TRY(waitid(P_PID, pids[i], &info, WEXITED | WNOWAIT));
	}
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(pids[0], 0);
	CHECK_EXIT(pids[1], 3);
	CHECK_EQ(zoo_reap(pids[2]) & 0x7f, SIGKILL);
	CHECK_EQ(zoo_reap(pids[3]) & 0x7f, SIGSEGV);
	zoo_pass();
}
