// area: refusals
// shows: an io_uring instance that is restricted is refused by name
// modes: plain leave-running ns
// expect: refused "and the kernel does not tell to what; let the program make it without"
#include "io_uring.h"

int main(void)
{
	struct io_uring_restriction nops = { .opcode = IORING_RESTRICTION_SQE_OP, .sqe_op = IORING_OP_NOP };
	struct ring ring;

	if (!ring_setup(&ring, 4, IORING_SETUP_R_DISABLED))
		zoo_skip("no io_uring");
	CHECK_EQ(syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_RESTRICTIONS, &nops, 1), 0);
	CHECK_EQ(syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_ENABLE_RINGS, NULL, 0), 0);
	zoo_ready();
	zoo_wait();
	ring_add(&ring, IORING_OP_NOP, -1, NULL, 0, 0, 1);
	ring_enter(&ring, 1);
	ring_expect(&ring, 1, 0);
	ring_add(&ring, IORING_OP_READ, 0, NULL, 0, 0, 2);
	ring_enter(&ring, 1);
	ring_expect(&ring, 2, -EACCES);
	zoo_pass();
}
