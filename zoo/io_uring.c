// area: asynchronous I/O
// shows: an io_uring instance is refused
// expect: refused "io_uring"
#include "zoo.h"
#include <linux/io_uring.h>

int main(void)
{
	struct io_uring_params params = { 0 };
	int fd = (int)syscall(SYS_io_uring_setup, 8, &params);

	if (fd < 0)
		zoo_skip("no io_uring");
	zoo_ready();
	zoo_wait();
	CHECK_EQ(syscall(SYS_io_uring_enter, fd, 0, 0, 0, NULL, 0), 0);
	zoo_pass();
}
