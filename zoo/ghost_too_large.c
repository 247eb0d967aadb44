// area: unlinked files
// shows: an unlinked file with more data than --ghost-limit allows is refused
// expect: refused "ghost"
#include "zoo.h"

int main(void)
{
	int fd = TRY(open("large", O_RDWR | O_CREAT, 0600));
	static char data[3 << 20];

	zoo_fill(data, sizeof data, 1);
	CHECK_EQ(write(fd, data, sizeof data), sizeof data);
	TRY(unlink("large"));
	zoo_ready();
	zoo_wait();
	memset(data, 0, sizeof data);
	CHECK_EQ(pread(fd, data, sizeof data, 0), sizeof data);
	CHECK(zoo_filled(data, sizeof data, 1));
	zoo_pass();
}
