// area: terminals
// shows: a slave opened with O_NOCTTY by a session leader does not become its controlling terminal
// foreign: yes
#include "zoo.h"

int main(void)
{
	int master = TRY(posix_openpt(O_RDWR | O_NOCTTY)), slave;

	TRY(unlockpt(master));
	slave = TRY(open(ptsname(master), O_RDWR | O_NOCTTY));
	CHECK_EQ(getsid(0), getpid());
	zoo_ready();
	zoo_wait();
	CHECK(open("/dev/tty", O_RDWR) < 0 && errno == ENXIO);
	CHECK(isatty(slave));
	zoo_pass();
}
