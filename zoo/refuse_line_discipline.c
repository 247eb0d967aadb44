// area: refusals
// shows: a terminal with another line discipline (TIOCSETD), as pppd sets it, is refused by name
// modes: plain leave-running ns userns
// expect: refused "it has line discipline 27"
#include "zoo.h"
#include <sys/ioctl.h>

int main(void)
{
	int master = TRY(posix_openpt(O_RDWR | O_NOCTTY)), slave, number = 27 /* N_NULL */;

	TRY(grantpt(master));
	TRY(unlockpt(master));
	slave = TRY(open(ptsname(master), O_RDWR | O_NOCTTY));
	TRY(ioctl(slave, TIOCSETD, &number));
	zoo_ready();
	zoo_wait();
	number = 0;
	TRY(ioctl(slave, TIOCGETD, &number));
	CHECK_EQ(number, 27);
	zoo_pass();
}
