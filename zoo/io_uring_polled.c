// area: asynchronous I/O
// shows: an io_uring instance whose requests a thread of the kernel fetches, in the name of a user who may not open
//   all files
// foreign: no CRIU keeps no io_uring
#include "io_uring.h"
#include <grp.h>

/* Opens a file by a request, which has to come back with this; 0 for success. */
static void expect_open(struct ring *ring, const char *path, int error)
{
	struct io_uring_cqe *cqe;

	ring_add(ring, IORING_OP_OPENAT, AT_FDCWD, (void *)(uintptr_t)path, 0, 0, 7);
	ring_wake(ring);
	WAIT_UNTIL(!ring_is_empty(ring));
	cqe = &ring->cqes[*ring->cq_head & (2 * ring->entries - 1)];
	CHECK_EQ(cqe->user_data, 7);
	if (error)
		CHECK_EQ(cqe->res, -error);
	else
		CHECK(cqe->res >= 0 && close(cqe->res) == 0);
	__atomic_store_n(ring->cq_head, *ring->cq_head + 1, __ATOMIC_RELEASE);
}

static void do_nothing(struct ring *ring, uint64_t data)
{
	ring_add(ring, IORING_OP_NOP, -1, NULL, 0, 0, data);
	ring_wake(ring);
	WAIT_UNTIL(!ring_is_empty(ring));
	ring_expect(ring, data, 0);
}

int main(void)
{
	struct ring ring;

	TRY(chmod(".", 0777));
	TRY(close(TRY(open("others", O_WRONLY | O_CREAT, 0600))));
	TRY(setgroups(0, NULL));
	TRY(setresgid(1000, 1000, 1000));
	TRY(setresuid(1000, 1000, 1000));
	TRY(close(TRY(open("own", O_WRONLY | O_CREAT, 0600))));
	if (!ring_poll(&ring, 10))
		zoo_skip("no io_uring");
	for (int i = 0; i < 103; i++)
		do_nothing(&ring, i);
	expect_open(&ring, "own", 0);
	expect_open(&ring, "others", EACCES);
	/* An answer waits to be read, and the thread sleeps. */
	ring_add(&ring, IORING_OP_NOP, -1, NULL, 0, 0, 2000);
	ring_wake(&ring);
	WAIT_UNTIL(!ring_is_empty(&ring) && ring_sleeps(&ring));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(getuid(), 1000);
	ring_expect(&ring, 2000, 0);
	expect_open(&ring, "own", 0);
	expect_open(&ring, "others", EACCES);
	for (int i = 0; i < 103; i++)
		do_nothing(&ring, i);
	CHECK(ring_is_empty(&ring));
	zoo_pass();
}
