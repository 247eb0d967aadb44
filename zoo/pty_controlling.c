// area: terminals
// shows: a child whose controlling terminal is a pseudoterminal: session, foreground group, one SIGHUP at its end
// foreign: yes
#include "zoo.h"
#include <sys/ioctl.h>
#include <termios.h>

static volatile sig_atomic_t hangups;

static void on_hup(int sig)
{
	hangups += sig == SIGHUP;
}

int main(void)
{
	int master = TRY(posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
	pid_t child;

	TRY(unlockpt(master));
	child = TRY(fork());
	if (child == 0) {
		struct sigaction sa = { .sa_handler = on_hup };
		int slave, tty;

		TRY(setsid());
		slave = TRY(open(ptsname(master), O_RDWR));
		TRY(close(master));
		tty = TRY(open("/dev/tty", O_RDWR));
		TRY(sigaction(SIGHUP, &sa, NULL));
		zoo_tell("child");
		zoo_wait();
		CHECK_EQ(tcgetsid(slave), getpid());
		CHECK_EQ(tcgetpgrp(tty), getpid());
		zoo_tell("verified");
		WAIT_UNTIL(hangups);
		zoo_sleep_ms(20);
		CHECK_EQ(hangups, 1);
		CHECK_EQ(read(slave, &tty, 1), 0);
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	zoo_await("verified");
	TRY(close(master));
	CHECK_EXIT(child, 0);
	zoo_pass();
}
