// area: asynchronous I/O
// shows: an io_uring instance that has worked: counts, answers that nobody has read, requests not submitted, registered buffers
// foreign: no CRIU keeps no io_uring
#include "io_uring.h"

int main(void)
{
	struct ring ring;
	char *area = zoo_map(1 << 16, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1), text[8] = "";
	struct iovec buffers[2] = { { area, 4096 }, { area + 8192, 8192 } };
	int file = TRY(open("file", O_RDWR | O_CREAT, 0600));

	if (!ring_setup(&ring, 8, 0))
		zoo_skip("no io_uring");
	if (syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS, buffers, 2))
		zoo_skip("no memory to be locked");
	/* Around the rings some times, and not to a multiple of their size. */
	for (int i = 0; i < 1003; i++) {
		ring_add(&ring, IORING_OP_NOP, -1, NULL, 0, 0, i);
		ring_enter(&ring, 1);
		ring_expect(&ring, i, 0);
	}
	/* Two answers wait to be read. */
	for (int i = 0; i < 2; i++)
		ring_add(&ring, IORING_OP_NOP, -1, NULL, 0, 0, 2000 + i);
	ring_enter(&ring, 2);
	/* One request is there, but the kernel has not been told. */
	memcpy(area + 8192, "content", 8);
	ring_add(&ring, IORING_OP_WRITE_FIXED, file, area + 8192, 8, 1, 3000);
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 2; i++)
		ring_expect(&ring, 2000 + i, 0);
	ring_enter(&ring, 1);
	ring_expect(&ring, 3000, 8);
	CHECK_EQ(pread(file, text, 8, 0), 8);
	CHECK(!strcmp(text, "content"));
	for (int i = 0; i < 100; i++) {
		ring_add(&ring, IORING_OP_READ_FIXED, file, area, 8, 0, i);
		ring_enter(&ring, 1);
		ring_expect(&ring, i, 8);
		CHECK(!strcmp(area, "content"));
	}
	CHECK(ring_is_empty(&ring));
	zoo_pass();
}
