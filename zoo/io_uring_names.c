// area: asynchronous I/O
// shows: descriptors of io_uring instances that threads have registered, each at its place
// foreign: no CRIU keeps no io_uring
#include "io_uring.h"
#include <pthread.h>

static struct ring first, second;

static void *use(void *unused)
{
	ring_name(&second, 5);
	ring_use_name(&second, 5, 50);
	zoo_tell("registered");
	zoo_wait();
	ring_use_name(&second, 5, 51);
	return unused;
}

int main(void)
{
	pthread_t thread;

	if (!ring_setup(&first, 8, 0) || !ring_setup(&second, 16, 0))
		zoo_skip("no io_uring");
	ring_name(&first, 3);
	ring_name(&second, 0);
	ring_use_name(&first, 3, 1);
	CHECK(!pthread_create(&thread, NULL, use, NULL));
	zoo_await("registered");
	zoo_ready();
	zoo_wait();
	CHECK(!pthread_join(thread, NULL));
	ring_use_name(&first, 3, 2);
	ring_use_name(&second, 0, 3);
	for (unsigned place = 0; place < 16; place++)
		if (place != 0 && place != 3) {
			CHECK_EQ(syscall(SYS_io_uring_enter, place, 0, 0, IORING_ENTER_REGISTERED_RING, NULL, 0), -1);
			CHECK_EQ(errno, EBADF);
		}
	zoo_pass();
}
