// area: terminals
// shows: a slave that is bind-mounted on another name, as containers have it on /dev/console, and open by that
// modes: ns userns
#include "zoo.h"
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <termios.h>

int main(void)
{
	int master = TRY(posix_openpt(O_RDWR | O_NOCTTY)), slave, other;
	char name[64], text[16];
	struct termios raw;

	TRY(grantpt(master));
	TRY(unlockpt(master));
	snprintf(name, sizeof name, "%s", ptsname(master));
	TRY(close(TRY(open("console", O_RDWR | O_CREAT, 0600))));
	TRY(mount(name, "console", NULL, MS_BIND, NULL));
	slave = TRY(open("console", O_RDWR | O_NOCTTY));
	other = TRY(open(name, O_RDWR | O_NOCTTY));
	TRY(tcgetattr(slave, &raw));
	cfmakeraw(&raw);
	TRY(tcsetattr(slave, TCSANOW, &raw));
	CHECK_EQ(write(master, "early", 5), 5);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(read(slave, text, sizeof text), 5);
	CHECK_EQ(write(slave, "answer", 6), 6);
	CHECK_EQ(read(master, text, sizeof text), 6);
	CHECK_EQ(write(master, "other", 5), 5);
	CHECK_EQ(read(other, text, sizeof text), 5);
	TRY(close(slave));
	slave = TRY(open("console", O_RDWR | O_NOCTTY));
	CHECK_EQ(write(slave, "again", 5), 5);
	CHECK_EQ(read(master, text, sizeof text), 5);
	zoo_pass();
}
