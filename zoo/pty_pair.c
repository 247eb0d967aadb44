// area: terminals
// shows: a pseudoterminal: master, slave, settings, window size, and data unread in both directions
// foreign: yes
#include "zoo.h"
#include <sys/ioctl.h>
#include <termios.h>

int main(void)
{
	int master = TRY(posix_openpt(O_RDWR | O_NOCTTY)), slave;
	struct winsize size = { 33, 77, 5, 6 }, size_now;
	struct termios raw, now;
	char text[16];

	TRY(grantpt(master));
	TRY(unlockpt(master));
	slave = TRY(open(ptsname(master), O_RDWR | O_NOCTTY));
	TRY(tcgetattr(slave, &raw));
	cfmakeraw(&raw);
	raw.c_cc[VMIN] = 3;
	cfsetspeed(&raw, B19200);
	TRY(tcsetattr(slave, TCSANOW, &raw));
	TRY(ioctl(master, TIOCSWINSZ, &size));
	TRY(dup2(master, 110));
	TRY(dup2(slave, 111));
	TRY(close(slave));
	TRY(close(master));
	zoo_ready();
	zoo_wait();
	TRY(tcgetattr(111, &now));
	CHECK_EQ(now.c_iflag, raw.c_iflag);
	CHECK_EQ(now.c_lflag, raw.c_lflag);
	CHECK_EQ(now.c_oflag, raw.c_oflag);
	CHECK_EQ(now.c_cflag, raw.c_cflag);
	CHECK(memcmp(now.c_cc, raw.c_cc, sizeof raw.c_cc) == 0);
	TRY(ioctl(111, TIOCGWINSZ, &size_now));
	CHECK(memcmp(&size, &size_now, sizeof size) == 0);
	CHECK_EQ(write(110, "down", 4), 4);
	CHECK_EQ(read(111, text, 16), 4);
	CHECK_EQ(write(111, "up", 2), 2);
	CHECK_EQ(read(110, text, 16), 2);
	CHECK(ptsname(110));
	zoo_pass();
}
