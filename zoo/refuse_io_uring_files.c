// area: refusals
// shows: an io_uring instance with a registered pipe that its task has closed is refused by name
// modes: plain leave-running ns
// expect: refused "of which only the path is known, which is not supported; let the program use its descriptors"
#include "io_uring.h"

int main(void)
{
	struct ring ring;
	char text[8] = "";
	int ends[2];

	if (!ring_setup(&ring, 4, 0))
		zoo_skip("no io_uring");
	TRY(pipe(ends));
	CHECK_EQ(write(ends[1], "text", 4), 4);
	CHECK_EQ(syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_FILES, &ends[0], 1), 0);
	TRY(close(ends[0]));
	zoo_ready();
	zoo_wait();
	/* The file is the first that is registered. */
	ring_add(&ring, IORING_OP_READ, 0, text, 4, 0, 1);
	ring.sqes[0].flags = IOSQE_FIXED_FILE;
	ring_enter(&ring, 1);
	ring_expect(&ring, 1, 4);
	CHECK(!strcmp(text, "text"));
	zoo_pass();
}
