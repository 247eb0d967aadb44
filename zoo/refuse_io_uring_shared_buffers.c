// area: refusals
// shows: an io_uring instance with registered buffers that several processes have open is refused by name
// modes: plain leave-running ns
// expect: refused "it has registered buffers, and several processes have it open"
#include "io_uring.h"

int main(void)
{
	char *area = zoo_map(4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	struct iovec buffer = { area, 4096 };
	struct ring ring;
	pid_t child;

	if (!ring_setup(&ring, 4, 0))
		zoo_skip("no io_uring");
	if (ring_register(ring.fd, IORING_REGISTER_BUFFERS, &buffer, 1))
		zoo_skip("no memory to be locked");
	child = TRY(fork());
	if (!child) {
		zoo_wait();
		_exit(0);
	}
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 0);
	ring_use(&ring, 1);
	zoo_pass();
}
