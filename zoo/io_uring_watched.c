// area: asynchronous I/O
// shows: an io_uring instance that epoll sets watch: one that is ready, an edge, and a set within a set
// foreign: no CRIU keeps no io_uring
#include "io_uring.h"
#include <sys/epoll.h>

static int ready(int set, uint64_t data)
{
	struct epoll_event event;
	int count = TRY(epoll_wait(set, &event, 1, 0));

	if (count)
		CHECK_EQ(event.data.u64, data);
	return count;
}

static int watch(int fd, unsigned events, uint64_t data)
{
	struct epoll_event event = { .events = events, .data.u64 = data };
	int set = TRY(epoll_create1(0));

	TRY(epoll_ctl(set, EPOLL_CTL_ADD, fd, &event));
	return set;
}

int main(void)
{
	struct ring ring, idle;
	int level, edge, outer, quiet;

	if (!ring_setup(&ring, 8, 0) || !ring_setup(&idle, 8, 0))
		zoo_skip("no io_uring");
	level = watch(ring.fd, EPOLLIN, 1);
	edge = watch(idle.fd, EPOLLIN | EPOLLET, 2);
	quiet = watch(idle.fd, EPOLLIN, 3);
	outer = watch(level, EPOLLIN, 4);
	ring_add(&ring, IORING_OP_NOP, -1, NULL, 0, 0, 10);
	ring_enter(&ring, 1);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(ready(outer, 4), 1);
	CHECK_EQ(ready(level, 1), 1);
	ring_expect(&ring, 10, 0);
	CHECK_EQ(ready(level, 1), 0);
	CHECK_EQ(ready(outer, 4), 0);
	CHECK_EQ(ready(edge, 2), 0);
	CHECK_EQ(ready(quiet, 3), 0);
	ring_add(&idle, IORING_OP_NOP, -1, NULL, 0, 0, 11);
	ring_enter(&idle, 1);
	CHECK_EQ(ready(edge, 2), 1);
	CHECK_EQ(ready(edge, 2), 0);
	CHECK_EQ(ready(quiet, 3), 1);
	/* It is known by its number. */
	TRY(epoll_ctl(edge, EPOLL_CTL_DEL, idle.fd, NULL));
	zoo_pass();
}
