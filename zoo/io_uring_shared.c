// area: asynchronous I/O
// shows: an io_uring instance that a parent and its children have open and mapped, one of them with the same table of
//   descriptors: what is in flight is that of a child, and all go on with the same rings
// varies: fd files
// foreign: no CRIU keeps no io_uring
#include "io_uring.h"

static struct ring ring;

static void use(uint64_t data)
{
	ring_add(&ring, IORING_OP_NOP, -1, NULL, 0, 0, data);
	ring_enter(&ring, 1);
	ring_expect(&ring, data, 0);
}

/* Some request of this process is in flight all the time. */
static void ask(void)
{
	long long rest[2] = { 0, 200000000 };

	while (!zoo_go()) {
		ring_add(&ring, IORING_OP_TIMEOUT, -1, rest, 1, 0, 1);
		ring_enter(&ring, 1);
		zoo_tell("asked");
		WAIT_UNTIL(!ring_is_empty(&ring));
		ring_expect(&ring, 1, -ETIME);
	}
	zoo_tell("rests");
}

int main(void)
{
	pid_t child, other;

	if (!ring_setup(&ring, 8, 0))
		zoo_skip("no io_uring");
	use(0);
	child = TRY(fork());
	if (!child) {
		ask();
		zoo_await("used");
		use(3);
		_exit(3);
	}
	other = (pid_t)TRY(syscall(SYS_clone, CLONE_FILES | SIGCHLD, 0, 0, 0, 0));
	if (!other) {
		zoo_await("rests");
		use(4);
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
