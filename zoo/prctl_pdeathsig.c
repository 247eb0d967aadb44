// area: other task state
// shows: the parent-death signal of a grandchild
// foreign: yes
#include "zoo.h"
#include <sys/prctl.h>

int main(void)
{
	int ends[2];
	pid_t child;
	char c;

	TRY(pipe(ends));
	child = TRY(fork());
	if (child == 0) {
		if (TRY(fork()) == 0) {
			sigset_t set;
			int sig;

			close(ends[0]);
			sigemptyset(&set);
			sigaddset(&set, SIGUSR2);
			TRY(sigprocmask(SIG_BLOCK, &set, NULL));
			TRY(prctl(PR_SET_PDEATHSIG, SIGUSR2));
			zoo_tell("grandchild");
			CHECK(sigwait(&set, &sig) == 0);
			CHECK_EQ(write(ends[1], "s", 1), 1);
			_exit(0);
		}
		zoo_wait();
		_exit(0);
	}
	TRY(close(ends[1]));
	zoo_await("grandchild");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 0);
	CHECK_EQ(read(ends[0], &c, 1), 1);
	CHECK_EQ(c, 's');
	zoo_pass();
}
