// area: files
// shows: open device nodes: null, zero, urandom, and one whose node was removed
// foreign: yes
#include "zoo.h"
#include <sys/sysmacros.h>

int main(void)
{
	int null = TRY(open("/dev/null", O_WRONLY)), zero = TRY(open("/dev/zero", O_RDWR));
	int random = TRY(open("/dev/urandom", O_RDONLY));
	struct stat st;
	char c = 1;

	zoo_ready();
	zoo_wait();
	CHECK_EQ(write(null, "x", 1), 1);
	CHECK_EQ(read(zero, &c, 1), 1);
	CHECK_EQ(c, 0);
	CHECK_EQ(read(random, &c, 1), 1);
	TRY(fstat(null, &st));
	CHECK_EQ(st.st_rdev, makedev(1, 3));
	zoo_pass();
}
