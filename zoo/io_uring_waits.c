// area: asynchronous I/O
// shows: a thread that waits for io_uring's answers, while another submits, with workers of the kernel beside them
// varies: Threads
// foreign: no CRIU keeps no io_uring
#include "io_uring.h"
#include <pthread.h>

static struct ring ring;

static void *answers(void *unused)
{
	ring_expect(&ring, 1, 0);
	ring_expect(&ring, 2, 4);
	ring_expect(&ring, 3, 4);
	return unused;
}

int main(void)
{
	int file = TRY(open("file", O_RDWR | O_CREAT, 0600));
	char text[8] = "";
	pthread_t thread;

	if (!ring_setup(&ring, 64, 0))
		zoo_skip("no io_uring");
	CHECK(!pthread_create(&thread, NULL, answers, NULL));
	ring_add(&ring, IORING_OP_NOP, -1, NULL, 0, 0, 1);
	ring_enter(&ring, 1);
	/* A worker of the kernel does this one, and stays for some seconds. */
	ring_add(&ring, IORING_OP_WRITE, file, "text", 4, 0, 2);
	ring.sqes[1].flags = IOSQE_ASYNC;
	ring_enter(&ring, 1);
	WAIT_UNTIL(*ring.cq_head == 2);
	zoo_ready();
	zoo_wait();
	ring_add(&ring, IORING_OP_READ, file, text, 4, 0, 3);
	ring_enter(&ring, 1);
	CHECK(!pthread_join(thread, NULL));
	CHECK(!strcmp(text, "text"));
	zoo_pass();
}
