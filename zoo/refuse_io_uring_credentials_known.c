// area: refusals
// shows: an io_uring instance with credentials that were registered is refused without --strict where the memory of the kernel is to be read
// modes: plain leave-running ns
// needs: kernel-memory
// expect: refused "it has registered credentials (IORING_REGISTER_PERSONALITY), and the kernel does not tell which; let the program make its requests with its own"
#include "io_uring.h"

int main(void)
{
	struct ring ring;
	long number;

	if (!ring_setup(&ring, 4, 0))
		zoo_skip("no io_uring");
	number = TRY(ring_register(ring.fd, IORING_REGISTER_PERSONALITY, NULL, 0));
	zoo_ready();
	zoo_wait();
	ring_add(&ring, IORING_OP_NOP, -1, NULL, 0, 0, 1);
	ring.sqes[0].personality = (uint16_t)number;
	ring_enter(&ring, 1);
	ring_expect(&ring, 1, 0);
	zoo_pass();
}
