// area: unlinked files
// shows: an unlinked file keeps its time stamps
// foreign: yes
#include "zoo.h"

int main(void)
{
	int fd = TRY(open("ghost", O_RDWR | O_CREAT, 0600));
	struct timespec times[2] = { { 1000000, 5000 }, { 2000000, 7000 } };
	struct stat now;

	CHECK_EQ(write(fd, "data", 4), 4);
	TRY(futimens(fd, times));
	TRY(unlink("ghost"));
	zoo_ready();
	zoo_wait();
	TRY(fstat(fd, &now));
	CHECK_EQ(now.st_mtim.tv_sec, 2000000);
	CHECK_EQ(now.st_mtim.tv_nsec / 1000, 7);
	zoo_pass();
}
