// area: refusals
// shows: an io_uring instance whose requests are fetched in the name of a user that its program is not any more is refused
//   by name
// modes: plain leave-running ns
// expect: refused "(IORING_SETUP_SQPOLL) has other credentials than the task, which is not supported; let the program submit its requests itself"
// varies: fd
#include "io_uring.h"

int main(void)
{
	struct ring ring;

	TRY(chmod(".", 0777));
	if (!ring_poll(&ring, 10))
		zoo_skip("no io_uring");
	TRY(setresuid(1000, 1000, 1000));
	zoo_ready();
	zoo_wait();
	ring_add(&ring, IORING_OP_NOP, -1, NULL, 0, 0, 1);
	ring_wake(&ring);
	ring_expect(&ring, 1, 0);
	zoo_pass();
}
