// area: asynchronous I/O
// shows: how many workers of the kernel an io_uring instance may have, and that a request that fails does not hold up those behind it
// foreign: no CRIU keeps no io_uring
#include "io_uring.h"

int main(void)
{
	unsigned limits[2] = { 3, 5 };
	struct ring ring;

	if (!ring_setup(&ring, 8, IORING_SETUP_SUBMIT_ALL))
		zoo_skip("no io_uring");
	CHECK_EQ(ring_register(ring.fd, IORING_REGISTER_IOWQ_MAX_WORKERS, limits, 2), 0);
	zoo_ready();
	zoo_wait();
	limits[0] = limits[1] = 0;
	CHECK_EQ(ring_register(ring.fd, IORING_REGISTER_IOWQ_MAX_WORKERS, limits, 2), 0);
	CHECK_EQ(limits[0], 3);
	CHECK_EQ(limits[1], 5);
	/* There is no such operation. */
	ring_add(&ring, 255, -1, NULL, 0, 0, 1);
	ring_add(&ring, IORING_OP_NOP, -1, NULL, 0, 0, 2);
	ring_enter(&ring, 2);
	ring_expect(&ring, 1, -EINVAL);
	ring_expect(&ring, 2, 0);
	zoo_pass();
}
