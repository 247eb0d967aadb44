// area: terminals
// shows: slaves whose master is closed
// foreign: yes
#include "zoo.h"

int main(void)
{
	int master = TRY(posix_openpt(O_RDWR | O_NOCTTY)), slave;
	char c;

	TRY(unlockpt(master));
	slave = TRY(open(ptsname(master), O_RDWR | O_NOCTTY));
	TRY(close(master));
	CHECK_EQ(read(slave, &c, 1), 0);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(read(slave, &c, 1), 0);
	CHECK(write(slave, "x", 1) < 0 && errno == EIO);
	zoo_pass();
}
