// area: refusals
// shows: an io_uring instance with a timeout that waits, hidden by another with several answers, is refused by name
// modes: plain leave-running ns
// needs: kernel-memory
// expect: refused "a timeout of it waits for its time, which is not supported; let the program wait by a timerfd"
#include "io_uring.h"

#ifndef IORING_TIMEOUT_MULTISHOT
#define IORING_TIMEOUT_MULTISHOT (1U << 6)
#endif

int main(void)
{
	static long long hour[2] = { 3600, 0 }, soon[2] = { 0, 1000000 };
	struct ring ring;

	if (!ring_setup(&ring, 4, 0))
		zoo_skip("no io_uring");
	/* As many answers as requests: two of the second. */
	ring_add(&ring, IORING_OP_TIMEOUT, -1, hour, 1, 0, 1);
	ring_add(&ring, IORING_OP_TIMEOUT, -1, soon, 1, 0, 2);
	ring.sqes[1].timeout_flags = IORING_TIMEOUT_MULTISHOT;
	ring.sqes[1].off = 2;
	ring_enter(&ring, 2);
	ring_expect(&ring, 2, -ETIME);
	ring_expect(&ring, 2, -ETIME);
	zoo_ready();
	zoo_wait();
	ring_use(&ring, 3);
	zoo_pass();
}
