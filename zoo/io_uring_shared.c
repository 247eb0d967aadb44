// area: asynchronous I/O
// shows: an io_uring instance that a parent and its children have open and mapped, one of them with the same table of
//   descriptors: what is in flight is that of a child, and all go on with the same rings
// varies: fd files
// foreign: no CRIU keeps no io_uring
#include "io_uring.h"

static struct ring ring;

int main(void)
{
	pid_t child, other;

	if (!ring_setup(&ring, 8, 0))
		zoo_skip("no io_uring");
	ring_use(&ring, 0);
	child = TRY(fork());
	if (!child) {
		ring_ask(&ring);
		zoo_tell("rests");
		zoo_await("used");
		ring_use(&ring, 3);
		_exit(3);
	}
	other = (pid_t)TRY(syscall(SYS_clone, CLONE_FILES | SIGCHLD, 0, 0, 0, 0));
	if (!other) {
		zoo_await("rests");
		ring_use(&ring, 4);
		TRY(close(ring.fd));
		_exit(4);
	}
	zoo_await("asked");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(other, 4);
	CHECK(fcntl(ring.fd, F_GETFD) < 0 && errno == EBADF);
	zoo_tell("used");
	CHECK_EXIT(child, 3);
	CHECK(ring_is_empty(&ring));
	zoo_pass();
}
