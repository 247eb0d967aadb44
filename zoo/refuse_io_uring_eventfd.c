// area: refusals
// shows: an io_uring instance that tells an eventfd is refused, with what its program does instead
// modes: plain leave-running ns
// expect: refused "it tells an eventfd of answers, which is not supported; start it with innodb_use_native_aio=0"
#include "io_uring.h"
#include <sys/eventfd.h>
#include <sys/prctl.h>

int main(void)
{
	int told = TRY(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
	struct ring ring;
	uint64_t value;

	/* What MariaDB is called. */
	TRY(prctl(PR_SET_NAME, "mariadbd"));
	if (!ring_setup(&ring, 4, 0))
		zoo_skip("no io_uring");
	CHECK_EQ(syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_EVENTFD, &told, 1), 0);
	zoo_ready();
	zoo_wait();
	ring_add(&ring, IORING_OP_NOP, -1, NULL, 0, 0, 1);
	ring_enter(&ring, 1);
	ring_expect(&ring, 1, 0);
	CHECK_EQ(read(told, &value, 8), 8);
	zoo_pass();
}
