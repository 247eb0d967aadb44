// area: refusals
// shows: an io_uring instance with groups of buffers that requests take one of is refused by name
// modes: plain leave-running ns
// expect: refused "group 300 of IORING_REGISTER_PBUF_RING or IORING_OP_PROVIDE_BUFFERS), and the kernel does not tell where they are; let the program name a buffer in each request"
#include "io_uring.h"
#include <sys/socket.h>

int main(void)
{
	char *area = zoo_map(8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	struct io_uring_buf_reg group = { .ring_addr = (uintptr_t)area, .ring_entries = 8, .bgid = 300 };
	struct io_uring_buf *buffer = (void *)area;
	struct ring ring;
	int ends[2];

	if (!ring_setup(&ring, 4, 0))
		zoo_skip("no io_uring");
	TRY(socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
	if (ring_register(ring.fd, IORING_REGISTER_PBUF_RING, &group, 1))
		zoo_skip("no groups of buffers");
	buffer->addr = (uintptr_t)area + 4096;
	buffer->len = 4096;
	/* The end of the first is that of the group. */
	buffer->resv = 1;
	zoo_ready();
	zoo_wait();
	CHECK_EQ(write(ends[1], "text", 5), 5);
	ring_add(&ring, IORING_OP_RECV, ends[0], NULL, 4096, 300, 1);
	ring.sqes[0].flags = IOSQE_BUFFER_SELECT;
	ring_enter(&ring, 1);
	ring_expect(&ring, 1, 5);
	CHECK(!strcmp(area + 4096, "text"));
	zoo_pass();
}
