// area: refusals
// shows: an io_uring instance that has given several answers to one request is refused by name
// modes: plain leave-running ns
// expect: refused "it has given more answers than it had requests (one may have many, as with IORING_ACCEPT_MULTISHOT or IORING_OP_SEND_ZC, and other instances send it theirs by IORING_OP_MSG_RING), so that nobody can tell what is in flight; let the program ask for each answer, send without IORING_OP_SEND_ZC, and wake its other threads by an eventfd"
#include "io_uring.h"
#include <poll.h>

/* Has a byte come through a pipe that is watched. */
static void come(struct ring *ring, int ends[2])
{
	char got;

	CHECK_EQ(write(ends[1], "x", 1), 1);
	ring_expect(ring, 1, POLLIN | POLLRDNORM);
	CHECK_EQ(read(ends[0], &got, 1), 1);
}

int main(void)
{
	struct ring ring;
	int ends[2];

	if (!ring_setup(&ring, 4, 0))
		zoo_skip("no io_uring");
	TRY(pipe(ends));
	ring_add(&ring, IORING_OP_POLL_ADD, ends[0], NULL, IORING_POLL_ADD_MULTI, 0, 1);
	ring.sqes[0].poll32_events = POLLIN | POLLRDNORM;
	ring_enter(&ring, 1);
	for (int i = 0; i < 4; i++)
		come(&ring, ends);
	zoo_ready();
	zoo_wait();
	come(&ring, ends);
	zoo_pass();
}
