// area: refusals
// shows: a child that has closed the io_uring instance whose rings it has inherited is refused by name
// modes: plain leave-running ns
// expect: refused "shows the rings of an io_uring instance that another task has open and it has not"
#include "io_uring.h"

int main(void)
{
	struct ring ring;
	pid_t child;

	if (!ring_setup(&ring, 4, 0))
		zoo_skip("no io_uring");
	child = TRY(fork());
	if (!child) {
		TRY(close(ring.fd));
		zoo_tell("closed");
		zoo_wait();
		_exit(0);
	}
	zoo_await("closed");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 0);
	ring_use(&ring, 1);
	zoo_pass();
}
