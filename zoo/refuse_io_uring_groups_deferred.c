// area: refusals
// shows: an io_uring instance with a ring of buffers in memory of the kernel, for which only its maker may ask, is refused by name
// modes: plain leave-running ns
// expect: refused "group 65535 of IORING_REGISTER_PBUF_RING or IORING_OP_PROVIDE_BUFFERS), and the kernel does not tell where they are; let the program name a buffer in each request"
#include "io_uring.h"

int main(void)
{
	struct io_uring_buf_reg group = { .ring_entries = 8, .bgid = 65535 };
	/* IOU_PBUF_RING_MMAP; older headers call it a pad. */
	uint16_t flags = 1;
	struct ring ring;

	memcpy((char *)&group + 14, &flags, sizeof flags);
	if (!ring_setup(&ring, 4, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN))
		zoo_skip("no io_uring with a single issuer");
	if (ring_register(ring.fd, IORING_REGISTER_PBUF_RING, &group, 1))
		zoo_skip("no groups of buffers");
	zoo_ready();
	zoo_wait();
	ring_add(&ring, IORING_OP_NOP, -1, NULL, 0, 0, 1);
	ring_enter(&ring, 1);
	ring_expect(&ring, 1, 0);
	zoo_pass();
}
