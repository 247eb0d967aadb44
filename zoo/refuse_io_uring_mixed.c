// area: refusals
// shows: an io_uring instance whose answers have two sizes (IORING_SETUP_CQE_MIXED) is refused by name
// modes: plain leave-running ns
// needs: kernel-memory
// expect: refused "it was set up with a flag that is not known (IORING_SETUP_CQE_MIXED, or a later one), which is not supported; let the program set it up without"
#include "io_uring.h"

#ifndef IORING_SETUP_CQE_MIXED
#define IORING_SETUP_CQE_MIXED (1U << 18)
#endif

int main(void)
{
	struct ring ring;

	if (!ring_setup(&ring, 4, IORING_SETUP_CQE_MIXED))
		zoo_skip("no io_uring with answers of two sizes");
	ring_use(&ring, 1);
	zoo_ready();
	zoo_wait();
	ring_use(&ring, 2);
	zoo_pass();
}
