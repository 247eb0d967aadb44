// area: asynchronous I/O
// shows: what a request to io_uring that is answered during the dump has done to files that were opened before the instance: a position, a pipe, a count
// varies: fd files
// foreign: no CRIU keeps no io_uring
#include "io_uring.h"
#include <sys/eventfd.h>

/* One that begins when that before it has been answered. */
static void add_linked(struct ring *ring, int op, int fd, void *at, unsigned length, uint64_t data)
{
	unsigned index = *ring->sq_tail & (ring->entries - 1);

	ring->sqes[(index - 1) & (ring->entries - 1)].flags |= IOSQE_IO_LINK;
	ring_add(ring, op, fd, at, length, 0, data);
	ring->sqes[index].off = (uint64_t)-1;
}

int main(void)
{
	int file = TRY(open("file", O_RDWR | O_CREAT, 0600)), count = TRY(eventfd(3, EFD_NONBLOCK)), ends[2];
	struct __kernel_timespec soon = { .tv_sec = 1 };
	uint64_t more = 4;
	struct ring ring;
	char got[8] = "", first[8] = "";

	CHECK_EQ(write(file, "abcdefgh", 8), 8);
	TRY(lseek(file, 2, SEEK_SET));
	TRY(pipe(ends));
	if (!ring_setup(&ring, 8, 0))
		zoo_skip("no io_uring");
	ring_add(&ring, IORING_OP_TIMEOUT, -1, &soon, 1, 0, 1);
	ring.sqes[0].timeout_flags = IORING_TIMEOUT_ETIME_SUCCESS;
	add_linked(&ring, IORING_OP_READ, file, first, 3, 2);
	add_linked(&ring, IORING_OP_WRITE, ends[1], "text", 4, 3);
	add_linked(&ring, IORING_OP_WRITE, count, &more, 8, 4);
	ring_enter(&ring, 4);
	zoo_ready();
	zoo_wait();
	ring_expect(&ring, 1, -ETIME);
	ring_expect(&ring, 2, 3);
	ring_expect(&ring, 3, 4);
	ring_expect(&ring, 4, 8);
	CHECK(!strcmp(first, "cde"));
	CHECK_EQ(lseek(file, 0, SEEK_CUR), 5);
	CHECK_EQ(read(ends[0], got, 8), 4);
	CHECK(!strcmp(got, "text"));
	CHECK_EQ(read(count, &more, 8), 8);
	CHECK_EQ(more, 7);
	zoo_pass();
}
