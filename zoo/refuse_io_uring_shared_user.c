// area: refusals
// shows: an io_uring instance that tasks of two user namespaces have open is refused by name
// modes: plain leave-running ns
// expect: refused "tasks of several user namespaces have it open"
#include "io_uring.h"

int main(void)
{
	struct ring ring;
	pid_t child;

	if (!ring_setup(&ring, 4, 0))
		zoo_skip("no io_uring");
	child = TRY(fork());
	if (!child) {
		TRY(unshare(CLONE_NEWUSER));
		zoo_tell("moved");
		zoo_wait();
		_exit(0);
	}
	zoo_await("moved");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 0);
	ring_use(&ring, 1);
	zoo_pass();
}
