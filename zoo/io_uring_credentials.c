// area: asynchronous I/O
// shows: --strict: an io_uring instance that had credentials, all of which its program has given back
// dump: --strict
// foreign: no CRIU keeps no io_uring
#include "io_uring.h"

int main(void)
{
	struct ring rings[2];
	long number = 0;

	if (!ring_setup(&rings[0], 4, 0) || !ring_setup(&rings[1], 4, IORING_SETUP_SINGLE_ISSUER))
		zoo_skip("no io_uring with a single issuer");
	for (int i = 0; i < 3; i++) {
		number = TRY(ring_register(rings[0].fd, IORING_REGISTER_PERSONALITY, NULL, 0));
		CHECK_EQ(ring_register(rings[0].fd, IORING_UNREGISTER_PERSONALITY, NULL, (unsigned)number), 0);
	}
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 2; i++) {
		number = TRY(ring_register(rings[i].fd, IORING_REGISTER_PERSONALITY, NULL, 0));
		ring_add(&rings[i], IORING_OP_NOP, -1, NULL, 0, 0, 1);
		rings[i].sqes[0].personality = (uint16_t)number;
		ring_enter(&rings[i], 1);
		ring_expect(&rings[i], 1, 0);
	}
	zoo_pass();
}
