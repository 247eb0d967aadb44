// area: refusals
// shows: an io_uring instance with a registered file that is open twice is refused by name
// modes: plain leave-running ns
// expect: refused "of which the kernel does not say that it is open only once, and not which of several is registered; let the program use its descriptors"
#include "io_uring.h"

int main(void)
{
	int file = TRY(open("file", O_RDWR | O_CREAT, 0600)), other = TRY(open("file", O_RDONLY));
	char text[8] = "";
	struct ring ring;

	if (!ring_setup(&ring, 4, 0))
		zoo_skip("no io_uring");
	CHECK_EQ(write(file, "text", 4), 4);
	CHECK_EQ(ring_register(ring.fd, IORING_REGISTER_FILES, &other, 1), 0);
	TRY(close(other));
	zoo_ready();
	zoo_wait();
	ring_add(&ring, IORING_OP_READ, 0, text, 4, 0, 1);
	ring.sqes[0].flags = IOSQE_FIXED_FILE;
	ring_enter(&ring, 1);
	ring_expect(&ring, 1, 4);
	CHECK(!strcmp(text, "text"));
	zoo_pass();
}
