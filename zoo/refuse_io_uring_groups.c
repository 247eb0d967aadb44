// area: refusals
// shows: an io_uring instance with buffers to choose from that requests have handed over is refused by name
// modes: plain leave-running ns
// expect: refused "group 300 of IORING_REGISTER_PBUF_RING or IORING_OP_PROVIDE_BUFFERS), and the kernel does not tell where they are; let the program name a buffer in each request"
#include "io_uring.h"
#include <sys/socket.h>

int main(void)
{
	char *area = zoo_map(4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	struct ring ring;
	int ends[2];

	if (!ring_setup(&ring, 4, 0))
		zoo_skip("no io_uring");
	TRY(socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
	/* One of 4096 bytes. */
	ring_add(&ring, IORING_OP_PROVIDE_BUFFERS, 1, area, 4096, 300, 1);
	ring_enter(&ring, 1);
	ring_expect(&ring, 1, 0);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(write(ends[1], "text", 5), 5);
	ring_add(&ring, IORING_OP_RECV, ends[0], NULL, 4096, 300, 1);
	ring.sqes[1].flags = IOSQE_BUFFER_SELECT;
	ring_enter(&ring, 1);
	ring_expect(&ring, 1, 5);
	CHECK(!strcmp(area, "text"));
	zoo_pass();
}
