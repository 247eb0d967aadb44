// area: refusals
// shows: an io_uring instance whose requests the thread of another one fetches is refused by name
// modes: plain leave-running ns
// expect: refused "works for another one as well (IORING_SETUP_ATTACH_WQ), and the kernel does not tell in whose name it does; let the program make each with a thread of its own"
// varies: fd
#include "io_uring.h"

int main(void)
{
	struct io_uring_params params = { .flags = IORING_SETUP_SQPOLL | IORING_SETUP_ATTACH_WQ };
	struct ring ring, other;

	if (!ring_poll(&ring, 10))
		zoo_skip("no io_uring");
	params.wq_fd = (unsigned)ring.fd;
	if (!ring_make(&other, 8, &params))
		zoo_skip("no thread for several instances");
	zoo_ready();
	zoo_wait();
	ring_add(&other, IORING_OP_NOP, -1, NULL, 0, 0, 1);
	ring_wake(&other);
	ring_expect(&other, 1, 0);
	zoo_pass();
}
