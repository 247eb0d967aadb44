// area: asynchronous I/O
// shows: an io_uring instance that a child has open, and not mapped: it submits what its parent has written into the rings
// foreign: no CRIU keeps no io_uring
#include "io_uring.h"

int main(void)
{
	struct ring ring;
	pid_t child;

	if (!ring_setup(&ring, 4, 0))
		zoo_skip("no io_uring");
	TRY(fcntl(ring.fd, F_SETFD, 0));
	TRY(madvise(ring.sqes, 4096, MADV_DONTFORK));
	TRY(madvise((void *)((uintptr_t)ring.sq_head & ~4095ul), 4096, MADV_DONTFORK));
	child = TRY(fork());
	if (!child) {
		zoo_wait();
		CHECK_EQ(fcntl(ring.fd, F_GETFD), 0);
		zoo_await("written");
		ring_enter(&ring, 1);
		_exit(3);
	}
	TRY(fcntl(ring.fd, F_SETFD, FD_CLOEXEC));
	ring_add(&ring, IORING_OP_NOP, -1, NULL, 0, 0, 1);
	ring_enter(&ring, 1);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(fcntl(ring.fd, F_GETFD), FD_CLOEXEC);
	ring_expect(&ring, 1, 0);
	ring_add(&ring, IORING_OP_NOP, -1, NULL, 0, 0, 2);
	zoo_tell("written");
	ring_expect(&ring, 2, 0);
	CHECK_EXIT(child, 3);
	zoo_pass();
}
