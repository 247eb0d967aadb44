// area: memory
// shows: the time stamp of a file that is mapped and was written to does not change
// foreign: yes
#include "zoo.h"

int main(void)
{
	int fd = TRY(open("file", O_RDWR | O_CREAT, 0600));
	struct stat before, after;
	char *area;

	TRY(ftruncate(fd, 8192));
	area = zoo_map(8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd);
	zoo_fill(area, 8192, 2);
	TRY(msync(area, 8192, MS_SYNC));
	TRY(fstat(fd, &before));
	zoo_ready();
	zoo_wait();
	TRY(fstat(fd, &after));
	CHECK_EQ(after.st_mtim.tv_sec, before.st_mtim.tv_sec);
	CHECK_EQ(after.st_mtim.tv_nsec, before.st_mtim.tv_nsec);
	CHECK(zoo_filled(area, 8192, 2));
	zoo_pass();
}
