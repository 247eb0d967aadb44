// area: refusals
// shows: an io_uring instance whose requests a thread of the kernel fetches is refused by name
// modes: plain leave-running ns
// expect: refused "(IORING_SETUP_SQPOLL), which is not supported; let the program submit them itself"
// varies: fd
#include "io_uring.h"

int main(void)
{
	struct ring ring;

	if (!ring_setup(&ring, 4, IORING_SETUP_SQPOLL))
		zoo_skip("no io_uring");
	zoo_ready();
	zoo_wait();
	ring_add(&ring, IORING_OP_NOP, -1, NULL, 0, 0, 1);
	CHECK(syscall(SYS_io_uring_enter, ring.fd, 1, 0, IORING_ENTER_SQ_WAKEUP, NULL, 0) >= 0);
	ring_expect(&ring, 1, 0);
	zoo_pass();
}
