// area: asynchronous I/O
// shows: files that are registered with an io_uring instance, and that its program has closed: their positions and flags, and which places share one
// foreign: no CRIU keeps no io_uring
// needs: kernel-memory
#include "io_uring.h"

/* Has a registered file read or written on from where it is. */
static void use(struct ring *ring, int op, int place, void *at, unsigned length, int result)
{
	unsigned index = *ring->sq_tail & (ring->entries - 1);

	ring_add(ring, op, place, at, length, 0, 7);
	ring->sqes[index].flags = IOSQE_FIXED_FILE;
	ring->sqes[index].off = (uint64_t)-1;
	ring_enter(ring, 1);
	ring_expect(ring, 7, result);
}

/* Opens a file, and leaves the descriptor to the ring. */
static void leave(struct ring *ring, const char *name, int flags, off_t at, unsigned first, unsigned count)
{
	int file = TRY(open(name, flags));

	TRY(lseek(file, at, SEEK_SET));
	for (unsigned place = first; place < first + count; place++) {
		struct io_uring_files_update update = { .offset = place, .fds = (uintptr_t)&file };

		CHECK_EQ(ring_register(ring->fd, IORING_REGISTER_FILES_UPDATE, &update, 1), 1);
	}
	TRY(close(file));
}

int main(void)
{
	int none[5] = { -1, -1, -1, -1, -1 }, file = TRY(open("a file", O_RDWR | O_CREAT, 0600));
	struct ring rings[2];
	char got[16] = "";

	/* The second one is for this thread only. */
	if (!ring_setup(&rings[0], 8, 0) || !ring_setup(&rings[1], 8, IORING_SETUP_SINGLE_ISSUER))
		zoo_skip("no io_uring with a single issuer");
	CHECK_EQ(write(file, "abcdefgh", 8), 8);
	for (int i = 0; i < 2; i++) {
		CHECK_EQ(ring_register(rings[i].fd, IORING_REGISTER_FILES, none, 5), 0);
		leave(&rings[i], "a file", O_RDONLY, 2, 0, 2);
		leave(&rings[i], "a file", O_WRONLY | O_APPEND, 0, 4, 1);
	}
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 2; i++) {
		use(&rings[i], IORING_OP_READ, 0, got, 2, 2);
		CHECK(!strcmp(got, "cd"));
		use(&rings[i], IORING_OP_READ, 1, got, 2, 2);
		CHECK(!strcmp(got, "ef"));
		use(&rings[i], IORING_OP_WRITE, 0, got, 2, -EBADF);
		use(&rings[i], IORING_OP_READ, 4, got, 2, -EBADF);
		use(&rings[i], IORING_OP_READ, 3, got, 2, -EBADF);
		use(&rings[i], IORING_OP_WRITE, 4, "end", 3, 3);
	}
	CHECK_EQ(pread(file, got, 16, 0), 14);
	CHECK(!strcmp(got, "abcdefghendend"));
	zoo_pass();
}
