// area: refusals
// shows: an io_uring instance that polls network devices is refused by name
// modes: plain leave-running ns
// expect: refused "it polls network devices itself (IORING_REGISTER_NAPI), which is not supported; let the program leave that to the kernel"
#include "io_uring.h"

/* Linux 6.9. */
#define REGISTER_NAPI 27

int main(void)
{
	struct {
		unsigned timeout;
		unsigned char prefer, rest[7];
		unsigned long long reserved[2];
	} napi = { .timeout = 50 };
	struct ring ring;

	if (!ring_setup(&ring, 4, 0))
		zoo_skip("no io_uring");
	if (ring_register(ring.fd, REGISTER_NAPI, &napi, 1))
		zoo_skip("no polling of network devices");
	zoo_ready();
	zoo_wait();
	ring_add(&ring, IORING_OP_NOP, -1, NULL, 0, 0, 1);
	ring_enter(&ring, 1);
	ring_expect(&ring, 1, 0);
	zoo_pass();
}
