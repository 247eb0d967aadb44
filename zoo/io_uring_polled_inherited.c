// area: asynchronous I/O
// shows: an io_uring instance whose requests a thread of the kernel fetches, and that a child has open and mapped as well
// foreign: no CRIU keeps no io_uring
#include "io_uring.h"

static struct ring ring;

static void use(uint64_t data)
{
	ring_add(&ring, IORING_OP_NOP, -1, NULL, 0, 0, data);
	ring_wake(&ring);
	ring_expect(&ring, data, 0);
}

int main(void)
{
	pid_t child;

	if (!ring_poll(&ring, 50))
		zoo_skip("no io_uring");
	use(1);
	child = TRY(fork());
	if (!child) {
		use(2);
		zoo_tell("used");
		zoo_wait();
		use(3);
		_exit(3);
	}
	zoo_await("used");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 3);
	use(4);
	zoo_pass();
}
