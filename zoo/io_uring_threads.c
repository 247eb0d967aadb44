// area: asynchronous I/O
// shows: a thread that always has a request to io_uring in flight, whose answer only that thread can be given
// build: -pthread
// varies: fd files
// foreign: no CRIU keeps no io_uring
#include "io_uring.h"
#include <pthread.h>

static struct ring ring;

static void *ask(void *unused)
{
	ring_ask(&ring);
	return unused;
}

int main(void)
{
	pthread_t thread;

	if (!ring_setup(&ring, 8, 0))
		zoo_skip("no io_uring");
	CHECK(!pthread_create(&thread, NULL, ask, NULL));
	zoo_await("asked");
	zoo_ready();
	zoo_wait();
	CHECK(!pthread_join(thread, NULL));
	CHECK(ring_is_empty(&ring));
	zoo_pass();
}
