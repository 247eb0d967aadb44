// area: asynchronous I/O
// shows: an io_uring instance that tells an eventfd of answers, one that tells it only of those of its workers, and a thread that knows one by its place
// foreign: no CRIU keeps no io_uring
// varies: fd files
// needs: kernel-memory
#include "io_uring.h"
#include <poll.h>
#include <sys/eventfd.h>

int main(void)
{
	int told = TRY(eventfd(3, EFD_NONBLOCK | EFD_CLOEXEC)), later = TRY(eventfd(0, EFD_NONBLOCK)), ends[2];
	struct ring rings[3];
	struct __kernel_timespec soon = { .tv_sec = 1 };
	uint64_t value;
	char got;

	for (int i = 0; i < 3; i++)
		if (!ring_setup(&rings[i], 4, 0))
			zoo_skip("no io_uring");
	TRY(pipe(ends));
	ring_use(&rings[0], 1);
	CHECK_EQ(ring_register(rings[0].fd, IORING_REGISTER_EVENTFD, &told, 1), 0);
	CHECK_EQ(ring_register(rings[1].fd, IORING_REGISTER_EVENTFD_ASYNC, &later, 1), 0);
	ring_name(&rings[2], 0);
	ring_use(&rings[0], 2);
	/* This may be answered while the program is stopped. */
	ring_add(&rings[0], IORING_OP_TIMEOUT, -1, &soon, 1, 0, 9);
	ring_enter(&rings[0], 1);
	zoo_ready();
	zoo_wait();
	ring_expect(&rings[0], 9, -ETIME);
	/* What it had counted, and two answers: counting the instance up has told nobody. */
	CHECK_EQ(read(told, &value, 8), 8);
	CHECK_EQ(value, 5);
	ring_use(&rings[0], 3);
	CHECK_EQ(read(told, &value, 8), 8);
	CHECK_EQ(value, 1);
	ring_use(&rings[1], 4);
	CHECK_EQ(read(later, &value, 8), -1);
	/* A worker of the kernel answers this. */
	ring_add(&rings[1], IORING_OP_READ, ends[0], &got, 1, 0, 5);
	rings[1].sqes[(*rings[1].sq_tail - 1) & 3].flags = IOSQE_ASYNC;
	CHECK_EQ(write(ends[1], "x", 1), 1);
	ring_enter(&rings[1], 1);
	ring_expect(&rings[1], 5, 1);
	/* The answer is there before anybody is told of it. */
	CHECK_EQ(poll(&(struct pollfd){ .fd = later, .events = POLLIN }, 1, -1), 1);
	CHECK_EQ(read(later, &value, 8), 8);
	ring_use_name(&rings[2], 0, 6);
	CHECK_EQ(read(told, &value, 8), -1);
	zoo_pass();
}
