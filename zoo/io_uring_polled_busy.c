// area: asynchronous I/O
// shows: an io_uring instance whose thread is awake all the time, and a thread of the program beside it
// varies: fd files
// foreign: no CRIU keeps no io_uring
#include "io_uring.h"
#include <pthread.h>

static volatile bool begun;

static void *rest(void *unused)
{
	begun = true;
	zoo_wait();
	return unused;
}

int main(void)
{
	uint64_t *buffer = zoo_map(1 << 16, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1), count = 0;
	struct iovec registered = { buffer, 1 << 16 };
	int file = TRY(open("file", O_RDWR | O_CREAT, 0600));
	struct ring ring;
	pthread_t thread;

	if (!ring_poll(&ring, 1000))
		zoo_skip("no io_uring");
	if (ring_register(ring.fd, IORING_REGISTER_BUFFERS, &registered, 1))
		zoo_skip("no memory to be locked");
	/* It has a number behind that of the kernel's thread. */
	CHECK(!pthread_create(&thread, NULL, rest, NULL));
	/* Its thread has begun when it has done something. */
	ring_add(&ring, IORING_OP_NOP, -1, NULL, 0, 0, 0);
	ring_wake(&ring);
	ring_expect(&ring, 0, 0);
	/* A thread that is being made has all signals blocked. */
	WAIT_UNTIL(begun);
	zoo_ready();
	while (!zoo_go() || count < 3) {
		count++;
		CHECK_EQ(pwrite(file, &count, sizeof count, 0), sizeof count);
		ring_add(&ring, IORING_OP_READ_FIXED, file, buffer, sizeof count, 0, count);
		ring_wake(&ring);
		WAIT_UNTIL(!ring_is_empty(&ring));
		ring_expect(&ring, count, sizeof count);
		CHECK_EQ(*buffer, count);
	}
	CHECK(!pthread_join(thread, NULL));
	zoo_pass();
}
