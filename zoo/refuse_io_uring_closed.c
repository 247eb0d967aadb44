// area: refusals
// shows: an io_uring instance that is open by a registered descriptor alone is refused by name
// modes: plain leave-running ns
// expect: refused "which is not supported; let the program keep the descriptor open"
#include "io_uring.h"

int main(void)
{
	struct ring ring;

	if (!ring_setup(&ring, 4, 0))
		zoo_skip("no io_uring");
	ring_name(&ring, 2);
	TRY(close(ring.fd));
	/* Nothing shows it any more. */
	TRY(munmap(ring.sqes, ring.entries * sizeof *ring.sqes));
	TRY(munmap((void *)((uintptr_t)ring.sq_head & ~4095ul), 4096));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(syscall(SYS_io_uring_enter, 2, 0, 0, IORING_ENTER_REGISTERED_RING, NULL, 0), 0);
	zoo_pass();
}
