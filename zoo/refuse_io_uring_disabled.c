// area: refusals
// shows: an io_uring instance that is not enabled yet is refused by name
// modes: plain leave-running ns
// expect: refused "it is not enabled yet (IORING_SETUP_R_DISABLED); try again when the program uses it"
#include "io_uring.h"

int main(void)
{
	struct ring ring;

	if (!ring_setup(&ring, 4, IORING_SETUP_R_DISABLED))
		zoo_skip("no io_uring");
	zoo_ready();
	zoo_wait();
	CHECK_EQ(ring_register(ring.fd, IORING_REGISTER_ENABLE_RINGS, NULL, 0), 0);
	ring_add(&ring, IORING_OP_NOP, -1, NULL, 0, 0, 1);
	ring_enter(&ring, 1);
	ring_expect(&ring, 1, 0);
	zoo_pass();
}
