// area: asynchronous I/O
// shows: an io_uring request that waits for what may never come is refused
// expect: refused "in flight"
#include "io_uring.h"

int main(void)
{
	struct ring ring;
	int ends[2];
	char c;

	if (!ring_setup(&ring, 8, 0))
		zoo_skip("no io_uring");
	TRY(pipe(ends));
	ring_add(&ring, IORING_OP_READ, ends[0], &c, 1, 0, 1);
	ring_enter(&ring, 1);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(write(ends[1], "x", 1), 1);
	ring_expect(&ring, 1, 1);
	zoo_pass();
}
