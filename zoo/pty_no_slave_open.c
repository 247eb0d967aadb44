// area: terminals
// shows: a controlling terminal whose slave is not open anywhere
// foreign: yes
#include "zoo.h"
#include <sys/ioctl.h>
#include <termios.h>

int main(void)
{
	int master = TRY(posix_openpt(O_RDWR | O_NOCTTY));
	pid_t child;

	TRY(unlockpt(master));
	child = TRY(fork());
	if (child == 0) {
		int tty;

		TRY(setsid());
		tty = TRY(open(ptsname(master), O_RDWR));
		TRY(close(master));
		TRY(close(tty));
		zoo_tell("child");
		zoo_wait();
		tty = TRY(open("/dev/tty", O_RDWR));
		CHECK_EQ(tcgetsid(tty), getpid());
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 0);
	zoo_pass();
}
