// area: signals
// shows: a blocked pending SIGTRAP, which cannot be told from those of tracing, is refused
// expect: refused "SIGTRAP"
#include "zoo.h"

int main(void)
{
	struct timespec now = { 0 };
	siginfo_t info;
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGTRAP);
	TRY(sigprocmask(SIG_BLOCK, &set, NULL));
	TRY(kill(getpid(), SIGTRAP));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(sigtimedwait(&set, &info, &now), SIGTRAP);
	CHECK_EQ(info.si_code, SI_USER);
	zoo_pass();
}
