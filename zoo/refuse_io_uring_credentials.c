// area: refusals
// shows: --strict: an io_uring instance with credentials that were registered is refused by name, whichever number they have
// dump: --strict
// modes: plain leave-running ns
// expect: refused "it has registered credentials (IORING_REGISTER_PERSONALITY), and the kernel does not tell which; let the program make its requests with its own"
#include "io_uring.h"

int main(void)
{
	struct ring ring;
	long first, second;

	if (!ring_setup(&ring, 4, 0))
		zoo_skip("no io_uring");
	first = TRY(ring_register(ring.fd, IORING_REGISTER_PERSONALITY, NULL, 0));
	second = TRY(ring_register(ring.fd, IORING_REGISTER_PERSONALITY, NULL, 0));
	CHECK_EQ(ring_register(ring.fd, IORING_UNREGISTER_PERSONALITY, NULL, (unsigned)first), 0);
	zoo_ready();
	zoo_wait();
	ring_add(&ring, IORING_OP_NOP, -1, NULL, 0, 0, 1);
	ring.sqes[0].personality = (uint16_t)second;
	ring_enter(&ring, 1);
	ring_expect(&ring, 1, 0);
	zoo_pass();
}
