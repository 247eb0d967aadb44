// An io_uring instance, by its system calls.
#include "zoo.h"
#include <linux/io_uring.h>
#include <sys/uio.h>

struct ring {
	int fd;
	unsigned entries;
	unsigned *sq_head, *sq_tail, *sq_flags, *sq_array, *cq_head, *cq_tail;
	struct io_uring_cqe *cqes;
	struct io_uring_sqe *sqes;
};

static inline bool ring_make(struct ring *ring, unsigned entries, struct io_uring_params *params)
{
	char *rings;

	ring->fd = (int)syscall(SYS_io_uring_setup, entries, params);
	if (ring->fd < 0)
		return false;
	TRY(fcntl(ring->fd, F_SETFD, FD_CLOEXEC));
	ring->entries = params->sq_entries;
	rings = zoo_map(params->sq_off.array + params->sq_entries * 4, PROT_READ | PROT_WRITE, MAP_SHARED, ring->fd);
	ring->sqes = mmap(NULL, params->sq_entries * sizeof *ring->sqes, PROT_READ | PROT_WRITE, MAP_SHARED, ring->fd,
			  IORING_OFF_SQES);
	CHECK(ring->sqes != MAP_FAILED);
	ring->sq_head = (void *)(rings + params->sq_off.head);
	ring->sq_tail = (void *)(rings + params->sq_off.tail);
	ring->sq_flags = (void *)(rings + params->sq_off.flags);
	ring->sq_array = (void *)(rings + params->sq_off.array);
	ring->cq_head = (void *)(rings + params->cq_off.head);
	ring->cq_tail = (void *)(rings + params->cq_off.tail);
	ring->cqes = (void *)(rings + params->cq_off.cqes);
	return true;
}

static inline bool ring_setup(struct ring *ring, unsigned entries, unsigned flags)
{
	struct io_uring_params params = { .flags = flags };

	return ring_make(ring, entries, &params);
}

/* io_uring_register(2). */
static inline long ring_register(int fd, unsigned request, const void *what, unsigned count)
{
	return syscall(SYS_io_uring_register, fd, request, what, count);
}

static inline void ring_add(struct ring *ring, int op, int fd, void *at, unsigned len, unsigned buffer, uint64_t data)
{
	unsigned tail = *ring->sq_tail, index = tail & (ring->entries - 1);
	struct io_uring_sqe *sqe = &ring->sqes[index];

	CHECK(tail - __atomic_load_n(ring->sq_head, __ATOMIC_ACQUIRE) < ring->entries);
	memset(sqe, 0, sizeof *sqe);
	sqe->opcode = (uint8_t)op;
	sqe->fd = fd;
	sqe->addr = (uintptr_t)at;
	sqe->len = len;
	sqe->buf_index = (uint16_t)buffer;
	sqe->user_data = data;
	ring->sq_array[index] = index;
	__atomic_store_n(ring->sq_tail, tail + 1, __ATOMIC_RELEASE);
}

static inline void ring_enter(struct ring *ring, unsigned count)
{
	CHECK_EQ(syscall(SYS_io_uring_enter, ring->fd, count, 0, 0, NULL, 0), (long)count);
}

static inline bool ring_sleeps(struct ring *ring)
{
	return __atomic_load_n(ring->sq_flags, __ATOMIC_RELAXED) & IORING_SQ_NEED_WAKEUP;
}

/* Has the thread that fetches requests know of one, if it says that it has to be woken. */
static inline void ring_wake(struct ring *ring)
{
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	if (ring_sleeps(ring))
		TRY(syscall(SYS_io_uring_enter, ring->fd, 0, 0, IORING_ENTER_SQ_WAKEUP, NULL, 0));
}

static inline bool ring_is_empty(struct ring *ring)
{
	return __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE) == *ring->cq_head;
}

/* With a thread of the kernel that fetches the requests, and sleeps after so many ms without any. Until it has begun it is
   called as the program. */
static inline bool ring_poll(struct ring *ring, unsigned idle)
{
	struct io_uring_params params = { .flags = IORING_SETUP_SQPOLL, .sq_thread_idle = idle };

	if (!ring_make(ring, 8, &params))
		return false;
	if (idle <= 100)
		WAIT_UNTIL(ring_sleeps(ring));
	return true;
}

/* Has a thread know the ring by a place in its own table as well. */
static inline void ring_name(struct ring *ring, unsigned place)
{
	struct io_uring_rsrc_update update = { .offset = place, .data = (unsigned)ring->fd };

	if (ring_register(ring->fd, IORING_REGISTER_RING_FDS, &update, 1) < 0)
		zoo_skip("no registered descriptors of rings");
}

/* Waits for the next answer, which must be this. */
static inline void ring_expect(struct ring *ring, uint64_t data, int result)
{
	struct io_uring_cqe *cqe;

	while (ring_is_empty(ring))
		if (syscall(SYS_io_uring_enter, ring->fd, 0, 1, IORING_ENTER_GETEVENTS, NULL, 0) < 0)
			CHECK_EQ(errno, EINTR);
	cqe = &ring->cqes[*ring->cq_head & (2 * ring->entries - 1)];
	CHECK_EQ(cqe->user_data, data);
	CHECK_EQ(cqe->res, result);
	__atomic_store_n(ring->cq_head, *ring->cq_head + 1, __ATOMIC_RELEASE);
}

/* Does nothing once, by way of the place that a thread knows the ring by. */
static inline void ring_use_name(struct ring *ring, unsigned place, uint64_t data)
{
	ring_add(ring, IORING_OP_NOP, -1, NULL, 0, 0, data);
	CHECK_EQ(syscall(SYS_io_uring_enter, place, 1, 0, IORING_ENTER_REGISTERED_RING, NULL, 0), 1);
	ring_expect(ring, data, 0);
}

/* Does nothing once. */
static inline void ring_use(struct ring *ring, uint64_t data)
{
	ring_add(ring, IORING_OP_NOP, -1, NULL, 0, 0, data);
	ring_enter(ring, 1);
	ring_expect(ring, data, 0);
}

/* Has a request of the caller's in flight all the time, until after the restore. */
static inline void ring_ask(struct ring *ring)
{
	long long rest[2] = { 0, 200000000 };

	while (!zoo_go()) {
		ring_add(ring, IORING_OP_TIMEOUT, -1, rest, 1, 0, 1);
		ring_enter(ring, 1);
		zoo_tell("asked");
		WAIT_UNTIL(!ring_is_empty(ring));
		ring_expect(ring, 1, -ETIME);
	}
}
