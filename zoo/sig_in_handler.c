// area: signals
// shows: a task inside of nested handlers finishes them and gets its old masks back
// foreign: yes
#include "zoo.h"

static volatile sig_atomic_t depth, deepest;

static void on_signal(int sig)
{
	volatile uint64_t local = 0x1122334455667788 + sig;

	deepest = ++depth;
	if (sig == SIGUSR1)
		raise(SIGUSR2);
	else {
		zoo_ready();
		zoo_wait();
	}
	CHECK_EQ(local, 0x1122334455667788 + sig);
	depth--;
}

int main(void)
{
	struct sigaction sa = { .sa_handler = on_signal };
	sigset_t now;

	TRY(sigaction(SIGUSR1, &sa, NULL));
	TRY(sigaction(SIGUSR2, &sa, NULL));
	raise(SIGUSR1);
	CHECK_EQ(depth, 0);
	CHECK_EQ(deepest, 2);
	TRY(sigprocmask(SIG_BLOCK, NULL, &now));
	CHECK(sigisemptyset(&now));
	zoo_pass();
}
