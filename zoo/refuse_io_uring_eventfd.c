// area: refusals
// shows: an io_uring instance that tells an eventfd which its task has closed is refused, with what its program does instead
// modes: plain leave-running ns
// needs: kernel-memory
// expect: refused "it tells an eventfd of answers that its task does not have open, which is not supported; start it with innodb_use_native_aio=0"
#include "io_uring.h"
#include <sys/eventfd.h>
#include <sys/prctl.h>

int main(void)
{
	int told = TRY(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
	struct ring ring;

	/* What MariaDB is called. */
	TRY(prctl(PR_SET_NAME, "mariadbd"));
	if (!ring_setup(&ring, 4, 0))
		zoo_skip("no io_uring");
	CHECK_EQ(syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_EVENTFD, &told, 1), 0);
	TRY(close(told));
	zoo_ready();
	zoo_wait();
	ring_use(&ring, 1);
	CHECK_EQ(ring_register(ring.fd, IORING_UNREGISTER_EVENTFD, NULL, 0), 0);
	zoo_pass();
}
