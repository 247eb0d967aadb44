// area: refusals
// shows: an io_uring instance that another one has sent answers is refused by name
// modes: plain leave-running ns
// expect: refused "other instances send it theirs by IORING_OP_MSG_RING"
#include "io_uring.h"

/* Has one instance send an answer to the other. */
static void send_answer(struct ring *from, struct ring *to, unsigned result, uint64_t data)
{
	unsigned index = *from->sq_tail & (from->entries - 1);

	ring_add(from, IORING_OP_MSG_RING, to->fd, NULL, result, 0, 1);
	from->sqes[index].off = data;
	ring_enter(from, 1);
	ring_expect(from, 1, 0);
	ring_expect(to, data, (int)result);
}

int main(void)
{
	struct ring from, to;

	if (!ring_setup(&from, 4, 0) || !ring_setup(&to, 4, 0))
		zoo_skip("no io_uring");
	send_answer(&from, &to, 7, 2);
	zoo_ready();
	zoo_wait();
	send_answer(&from, &to, 8, 3);
	zoo_pass();
}
