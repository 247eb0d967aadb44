// area: asynchronous I/O
// shows: rings of buffers that requests to io_uring choose from: which one is the next, and of which one a part is left
// foreign: no CRIU keeps no io_uring
// needs: kernel-memory
#include "io_uring.h"
#include <sys/socket.h>

/* IOU_PBUF_RING_INC: a request may take a part of a buffer. */
#define PARTS 2

static struct io_uring_buf *group_make(struct ring *ring, unsigned number, unsigned entries, unsigned flags)
{
	struct io_uring_buf *buffers = zoo_map(4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	struct io_uring_buf_reg group = {
		.ring_addr = (uintptr_t)buffers, .ring_entries = entries, .bgid = (uint16_t)number,
	};

	/* Older headers call it a pad. */
	memcpy((char *)&group + 14, &(uint16_t){ (uint16_t)flags }, 2);
	return ring_register(ring->fd, IORING_REGISTER_PBUF_RING, &group, 1) ? NULL : buffers;
}

/* The end of the first one is that of the group. */
static void give(struct io_uring_buf *buffers, unsigned entries, void *at, unsigned length)
{
	struct io_uring_buf *buffer = &buffers[buffers[0].resv & (entries - 1)];

	buffer->addr = (uintptr_t)at;
	buffer->len = length;
	__atomic_store_n(&buffers[0].resv, (uint16_t)(buffers[0].resv + 1), __ATOMIC_RELEASE);
}

/* Reads or receives into the next buffer. */
static void next(struct ring *ring, int op, int fd, unsigned group, unsigned length, uint64_t from, int result)
{
	unsigned index = *ring->sq_tail & (ring->entries - 1);

	ring_add(ring, op, fd, NULL, length, group, 1);
	ring->sqes[index].flags = IOSQE_BUFFER_SELECT;
	ring->sqes[index].off = from;
	ring_enter(ring, 1);
	ring_expect(ring, 1, result);
}

static void receive(struct ring *ring, int ends[2], char *into)
{
	CHECK_EQ(write(ends[1], "text", 5), 5);
	next(ring, IORING_OP_RECV, ends[0], 300, 64, 0, 5);
	CHECK(!strcmp(into, "text"));
	*into = 0;
}

int main(void)
{
	char *area = zoo_map(4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1), got[8];
	int file = TRY(open("file", O_RDWR | O_CREAT, 0600)), ends[2];
	struct io_uring_buf *whole, *in_parts;
	struct ring ring, other;

	if (!ring_setup(&ring, 4, 0) || !ring_setup(&other, 2, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN))
		zoo_skip("no io_uring with a single issuer");
	whole = group_make(&ring, 300, 4, 0);
	in_parts = group_make(&other, 7, 2, PARTS);
	if (!whole || !in_parts || !group_make(&ring, 65535, 8, 0))
		zoo_skip("no groups of buffers that are taken in parts");
	TRY(socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
	for (int i = 0; i < 4; i++)
		give(whole, 4, area + 64 * i, 64);
	/* Around the ring, and one more. */
	for (int i = 0; i < 5; i++) {
		receive(&ring, ends, area + 64 * (i % 4));
		give(whole, 4, area + 64 * (i % 4), 64);
	}
	CHECK_EQ(write(file, "abcdefgh", 8), 8);
	give(in_parts, 2, area + 1024, 4);
	give(in_parts, 2, area + 1028, 4);
	next(&other, IORING_OP_READ, file, 7, 3, 0, 3);
	next(&other, IORING_OP_READ, file, 7, 3, 3, 1);
	next(&other, IORING_OP_READ, file, 7, 2, 4, 2);
	zoo_ready();
	zoo_wait();
	for (int i = 5; i < 9; i++)
		receive(&ring, ends, area + 64 * (i % 4));
	CHECK_EQ(write(ends[1], "text", 5), 5);
	next(&ring, IORING_OP_RECV, ends[0], 300, 64, 0, -ENOBUFS);
	CHECK_EQ(read(ends[0], got, 8), 5);
	next(&other, IORING_OP_READ, file, 7, 3, 6, 2);
	CHECK(!memcmp(area + 1024, "abcdefgh", 9));
	next(&other, IORING_OP_READ, file, 7, 3, 0, -ENOBUFS);
	zoo_pass();
}
