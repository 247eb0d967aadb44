// area: terminals
// shows: two open slaves on one master, owner and mode of the slave's node, several masters
// foreign: yes
#include "zoo.h"

int main(void)
{
	int masters[3], slaves[3], second;
	struct stat st;
	char c;

	for (int i = 0; i < 3; i++) {
		masters[i] = TRY(posix_openpt(O_RDWR | O_NOCTTY | O_NONBLOCK));
		TRY(unlockpt(masters[i]));
		slaves[i] = TRY(open(ptsname(masters[i]), O_RDWR | O_NOCTTY));
	}
	second = TRY(open(ptsname(masters[1]), O_RDWR | O_NOCTTY));
	TRY(fchown(slaves[1], 11, 12));
	TRY(fchmod(slaves[1], 0612));
	TRY(close(masters[0]));
	TRY(close(slaves[0]));
	zoo_ready();
	zoo_wait();
	TRY(fstat(second, &st));
	CHECK_EQ(st.st_uid, 11);
	CHECK_EQ(st.st_gid, 12);
	CHECK_EQ(st.st_mode & 0777, 0612);
	CHECK_EQ(write(second, "x", 1), 1);
	CHECK_EQ(read(masters[1], &c, 1), 1);
	CHECK_EQ(c, 'x');
	CHECK_EQ(fcntl(masters[1], F_GETFL) & O_NONBLOCK, O_NONBLOCK);
	CHECK(read(masters[2], &c, 1) < 0 && errno == EAGAIN);
	zoo_pass();
}
