// area: asynchronous I/O
// shows: which of several descriptions of a file is registered with an io_uring instance; a pipe, an eventfd and a file without a name that are
// foreign: no CRIU keeps no io_uring
// needs: kernel-memory
#include "io_uring.h"
#include <sys/eventfd.h>

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

int main(void)
{
	int file = TRY(open("file", O_RDWR | O_CREAT, 0600)), other = TRY(open("file", O_RDONLY)), ends[2], gone;
	int event = TRY(eventfd(5, 0)), files[4];
	struct ring ring;
	uint64_t count = 0;
	char got[8] = "";

	if (!ring_setup(&ring, 8, 0))
		zoo_skip("no io_uring");
	CHECK_EQ(write(file, "abcdefgh", 8), 8);
	TRY(lseek(file, 6, SEEK_SET));
	TRY(lseek(other, 2, SEEK_SET));
	TRY(pipe(ends));
	gone = TRY(open("gone", O_RDWR | O_CREAT, 0600));
	CHECK_EQ(write(gone, "gone", 4), 4);
	TRY(lseek(gone, 1, SEEK_SET));
	TRY(unlink("gone"));
	files[0] = other;
	files[1] = ends[1];
	files[2] = event;
	files[3] = gone;
	CHECK_EQ(ring_register(ring.fd, IORING_REGISTER_FILES, files, 4), 0);
	zoo_ready();
	zoo_wait();
	use(&ring, IORING_OP_READ, 0, got, 2, 2);
	CHECK(!strcmp(got, "cd"));
	CHECK_EQ(lseek(other, 0, SEEK_CUR), 4);
	CHECK_EQ(lseek(file, 0, SEEK_CUR), 6);
	/* It was opened for reading. */
	use(&ring, IORING_OP_WRITE, 0, got, 2, -EBADF);
	use(&ring, IORING_OP_WRITE, 1, got, 2, 2);
	CHECK_EQ(read(ends[0], got, 8), 2);
	use(&ring, IORING_OP_READ, 2, &count, 8, 8);
	CHECK_EQ(count, 5);
	use(&ring, IORING_OP_READ, 3, got, 8, 3);
	CHECK(!strncmp(got, "one", 3));
	CHECK_EQ(lseek(gone, 0, SEEK_CUR), 4);
	zoo_pass();
}
