// area: asynchronous I/O
// shows: the limit on locked memory holds for an io_uring instance, whose buffers were registered under a higher one
// foreign: no CRIU keeps no io_uring
#include "io_uring.h"
#include <grp.h>
#include <sys/resource.h>

int main(void)
{
	const struct rlimit none = { 0, 0 };
	char *area = zoo_map(1 << 16, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	struct iovec buffer = { area, 1 << 16 };
	struct ring ring;

	TRY(chmod(".", 0777));
	TRY(setgroups(0, NULL));
	TRY(setresgid(1000, 1000, 1000));
	TRY(setresuid(1000, 1000, 1000));
	if (!ring_setup(&ring, 8, 0))
		zoo_skip("no io_uring");
	if (ring_register(ring.fd, IORING_REGISTER_BUFFERS, &buffer, 1))
		zoo_skip("no memory to be locked");
	TRY(setrlimit(RLIMIT_MEMLOCK, &none));
	zoo_ready();
	zoo_wait();
	TRY(ring_register(ring.fd, IORING_UNREGISTER_BUFFERS, NULL, 0));
	CHECK(ring_register(ring.fd, IORING_REGISTER_BUFFERS, &buffer, 1) < 0 && errno == ENOMEM);
	ring_use(&ring, 1);
	zoo_pass();
}
