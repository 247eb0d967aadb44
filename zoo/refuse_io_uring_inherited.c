// area: refusals
// shows: an io_uring instance that a child has open as well, but not mapped, is refused by name
// modes: plain leave-running ns
// expect: refused "is shared with another process, which is not supported; let the program close and unmap it in its children"
#include "io_uring.h"

int main(void)
{
	struct ring ring;
	pid_t child;

	if (!ring_setup(&ring, 4, 0))
		zoo_skip("no io_uring");
	TRY(madvise(ring.sqes, 4096, MADV_DONTFORK));
	TRY(madvise((void *)((uintptr_t)ring.sq_head & ~4095ul), 4096, MADV_DONTFORK));
	child = TRY(fork());
	if (!child) {
		zoo_wait();
		_exit(0);
	}
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 0);
	ring_add(&ring, IORING_OP_NOP, -1, NULL, 0, 0, 1);
	ring_enter(&ring, 1);
	ring_expect(&ring, 1, 0);
	zoo_pass();
}
