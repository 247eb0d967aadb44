// area: asynchronous I/O
// shows: a registered buffer that the kernel writes to all the time, and the program never
// varies: fd files
// foreign: no CRIU keeps no io_uring
#include "io_uring.h"

int main(void)
{
	uint64_t *buffer = zoo_map(1 << 16, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1), count = 0;
	struct iovec registered = { buffer, 1 << 16 };
	int file = TRY(open("file", O_RDWR | O_CREAT, 0600));
	struct ring ring;

	if (!ring_setup(&ring, 8, 0))
		zoo_skip("no io_uring");
	if (ring_register(ring.fd, IORING_REGISTER_BUFFERS, &registered, 1))
		zoo_skip("no memory to be locked");
	zoo_ready();
	while (!zoo_go()) {
		/* What the kernel has brought is what the program has read last. */
		CHECK_EQ(*buffer, count);
		count++;
		CHECK_EQ(pwrite(file, &count, sizeof count, 0), sizeof count);
		ring_add(&ring, IORING_OP_READ_FIXED, file, buffer, sizeof count, 0, count);
		ring_enter(&ring, 1);
		ring_expect(&ring, count, sizeof count);
		zoo_sleep_ms(1);
	}
	CHECK_EQ(*buffer, count);
	CHECK(count > 0);
	zoo_pass();
}
