// area: terminals
// shows: a pseudoterminal with lines written that nobody has read yet
// foreign: yes
#include "zoo.h"
#include <termios.h>

int main(void)
{
	int master = TRY(posix_openpt(O_RDWR | O_NOCTTY)), slave;
	struct termios raw;
	char text[64];

	TRY(unlockpt(master));
	slave = TRY(open(ptsname(master), O_RDWR | O_NOCTTY));
	TRY(tcgetattr(slave, &raw));
	cfmakeraw(&raw);
	TRY(tcsetattr(slave, TCSANOW, &raw));
	CHECK_EQ(write(slave, "to the master", 13), 13);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(read(master, text, sizeof text), 13);
	CHECK(memcmp(text, "to the master", 13) == 0);
	zoo_pass();
}
