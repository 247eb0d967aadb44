// area: refusals
// shows: an io_uring instance of a 32-bit program is refused by name
// build: -m32
// modes: plain ns
// expect: refused "of a 32-bit program"
#include "io_uring.h"

int main(void)
{
	struct ring ring;

	if (!ring_setup(&ring, 4, 0))
		zoo_skip("no io_uring");
	zoo_ready();
	zoo_wait();
	CHECK_EQ(*ring.cq_tail, 0);
	zoo_pass();
}
