// area: asynchronous I/O
// shows: io_uring instances that are restricted: to some requests, to flags that they must have, and to what may be registered; how many workers one may have
// foreign: no CRIU keeps no io_uring
// needs: kernel-memory
#include "io_uring.h"

static void restrict_to(struct ring *ring, const struct io_uring_restriction *to, unsigned count)
{
	CHECK_EQ(ring_register(ring->fd, IORING_REGISTER_RESTRICTIONS, to, count), 0);
	CHECK_EQ(ring_register(ring->fd, IORING_REGISTER_ENABLE_RINGS, NULL, 0), 0);
}

/* Makes a request with some flags. */
static void ask(struct ring *ring, int op, int fd, void *at, unsigned flags, int result)
{
	unsigned index = *ring->sq_tail & (ring->entries - 1);

	ring_add(ring, op, fd, at, 2, 0, 7);
	ring->sqes[index].flags = (uint8_t)flags;
	ring_enter(ring, 1);
	ring_expect(ring, 7, result);
}

int main(void)
{
	static const struct io_uring_restriction nops[] = {
		{ .opcode = IORING_RESTRICTION_SQE_OP, .sqe_op = IORING_OP_NOP },
	};
	/* What a dump asks first (the last three by their numbers: Linux 6.9, 6.13), and more that tells nothing. */
	static const struct io_uring_restriction asked[] = {
		{ .opcode = IORING_RESTRICTION_SQE_OP, .sqe_op = IORING_OP_NOP },
		{ .opcode = IORING_RESTRICTION_REGISTER_OP, .register_op = IORING_REGISTER_EVENTFD },
		{ .opcode = IORING_RESTRICTION_REGISTER_OP, .register_op = 1 },
		{ .opcode = IORING_RESTRICTION_REGISTER_OP, .register_op = 3 },
		{ .opcode = IORING_RESTRICTION_REGISTER_OP, .register_op = 5 },
		{ .opcode = IORING_RESTRICTION_REGISTER_OP, .register_op = 9 },
		{ .opcode = IORING_RESTRICTION_REGISTER_OP, .register_op = 11 },
		{ .opcode = IORING_RESTRICTION_REGISTER_OP, .register_op = 12 },
		{ .opcode = IORING_RESTRICTION_REGISTER_OP, .register_op = 26 },
		{ .opcode = IORING_RESTRICTION_REGISTER_OP, .register_op = 27 },
		{ .opcode = IORING_RESTRICTION_REGISTER_OP, .register_op = 33 },
		{ .opcode = IORING_RESTRICTION_REGISTER_OP, .register_op = 34 },
	};
	static const struct io_uring_restriction reads[] = {
		{ .opcode = IORING_RESTRICTION_SQE_OP, .sqe_op = IORING_OP_READ },
		{ .opcode = IORING_RESTRICTION_SQE_FLAGS_REQUIRED, .sqe_flags = IOSQE_FIXED_FILE },
		{ .opcode = IORING_RESTRICTION_SQE_FLAGS_ALLOWED, .sqe_flags = IOSQE_ASYNC },
		{ .opcode = IORING_RESTRICTION_REGISTER_OP, .register_op = IORING_REGISTER_FILES_UPDATE },
	};
	int file = TRY(open("file", O_RDWR | O_CREAT, 0600)), files[2] = { file, -1 };
	struct io_uring_files_update update = { .offset = 1, .fds = (uintptr_t)&file };
	unsigned limits[2] = { 3, 5 };
	struct ring nop, read, wide;
	char got[4] = "";

	if (!ring_setup(&nop, 4, IORING_SETUP_R_DISABLED) || !ring_setup(&wide, 4, IORING_SETUP_R_DISABLED) ||
	    !ring_setup(&read, 4, IORING_SETUP_R_DISABLED | IORING_SETUP_SINGLE_ISSUER))
		zoo_skip("no io_uring");
	CHECK_EQ(write(file, "abcd", 4), 4);
	restrict_to(&nop, nops, 1);
	restrict_to(&wide, asked, sizeof asked / sizeof *asked);
	CHECK_EQ(ring_register(read.fd, IORING_REGISTER_FILES, files, 2), 0);
	CHECK_EQ(ring_register(read.fd, IORING_REGISTER_IOWQ_MAX_WORKERS, limits, 2), 0);
	restrict_to(&read, reads, 4);
	for (int i = 0; i < 3; i++)
		ask(&read, IORING_OP_READ, 0, got, IOSQE_FIXED_FILE, 2);
	zoo_ready();
	zoo_wait();
	ring_use(&nop, 1);
	ask(&wide, IORING_OP_READ, file, got, 0, -EACCES);
	CHECK_EQ(ring_register(wide.fd, IORING_REGISTER_FILES, files, 2), -1);
	CHECK_EQ(errno, EACCES);
	ask(&nop, IORING_OP_READ, file, got, 0, -EACCES);
	CHECK_EQ(ring_register(nop.fd, IORING_REGISTER_FILES, files, 2), -1);
	CHECK_EQ(errno, EACCES);
	memset(got, 0, sizeof got);
	ask(&read, IORING_OP_READ, 0, got, IOSQE_FIXED_FILE | IOSQE_ASYNC, 2);
	CHECK(!strcmp(got, "ab"));
	ask(&read, IORING_OP_READ, file, got, 0, -EACCES);
	ask(&read, IORING_OP_READ, 0, got, IOSQE_FIXED_FILE | IOSQE_IO_DRAIN, -EACCES);
	ask(&read, IORING_OP_NOP, 0, NULL, IOSQE_FIXED_FILE, -EACCES);
	CHECK_EQ(ring_register(read.fd, IORING_REGISTER_FILES_UPDATE, &update, 1), 1);
	ask(&read, IORING_OP_READ, 1, got, IOSQE_FIXED_FILE, 2);
	CHECK_EQ(ring_register(read.fd, IORING_REGISTER_PROBE, NULL, 0), -1);
	CHECK_EQ(errno, EACCES);
	/* The limits are those of the thread. */
	limits[0] = limits[1] = 0;
	CHECK(ring_setup(&nop, 4, 0));
	CHECK_EQ(ring_register(nop.fd, IORING_REGISTER_IOWQ_MAX_WORKERS, limits, 2), 0);
	CHECK_EQ(limits[0], 3);
	CHECK_EQ(limits[1], 5);
	zoo_pass();
}
