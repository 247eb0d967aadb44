// area: asynchronous I/O
// shows: files that are registered with an io_uring instance: of each the only description, which the task has open
// foreign: no CRIU keeps no io_uring
#include "io_uring.h"

/* Reads some bytes from a place of registered files, where its position is. */
static void read_on(struct ring *ring, unsigned place, const char *text)
{
	unsigned index = *ring->sq_tail & (ring->entries - 1), length = (unsigned)strlen(text);
	char got[8] = "";

	ring_add(ring, IORING_OP_READ, (int)place, got, length, 0, place);
	ring->sqes[index].flags = IOSQE_FIXED_FILE;
	ring->sqes[index].off = (uint64_t)-1;
	ring_enter(ring, 1);
	ring_expect(ring, place, (int)length);
	CHECK(!strcmp(got, text));
}

int main(void)
{
	int file = TRY(open("a file \\ of text", O_RDWR | O_CREAT, 0600)), other, files[5];
	char got[4] = "";
	struct ring ring;

	if (!ring_setup(&ring, 8, 0))
		zoo_skip("no io_uring");
	CHECK_EQ(write(file, "abcdefghij", 10), 10);
	TRY(lseek(file, 2, SEEK_SET));
	TRY(close(TRY(open("other", O_WRONLY | O_CREAT, 0600))));
	TRY(truncate("other", 4));
	other = TRY(open("other", O_RDONLY));
	/* The same descriptions by other descriptors. */
	files[0] = TRY(dup(file));
	files[1] = files[3] = -1;
	files[2] = other;
	files[4] = file;
	CHECK_EQ(ring_register(ring.fd, IORING_REGISTER_FILES, files, 5), 0);
	read_on(&ring, 0, "cd");
	zoo_ready();
	zoo_wait();
	/* All have one position. */
	read_on(&ring, 4, "ef");
	CHECK_EQ(read(file, got, 2), 2);
	CHECK(!strcmp(got, "gh"));
	read_on(&ring, 0, "ij");
	ring_add(&ring, IORING_OP_WRITE, 2, "text", 4, 0, 1);
	ring.sqes[(*ring.sq_tail - 1) & 7].flags = IOSQE_FIXED_FILE;
	ring_enter(&ring, 1);
	ring_expect(&ring, 1, -EBADF);
	/* Nobody holds a lease on it, or would be told. */
	CHECK_EQ(fcntl(file, F_GETLEASE), F_UNLCK);
	CHECK_EQ(fcntl(file, F_GETSIG), 0);
	CHECK_EQ(fcntl(file, F_GETOWN), 0);
	zoo_pass();
}
