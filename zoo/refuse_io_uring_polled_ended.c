// area: refusals
// shows: an io_uring instance whose thread has ended, since its program has started another, is refused by name
// modes: plain leave-running ns
// expect: refused "the thread that fetched its requests has ended (IORING_SETUP_SQPOLL); let the program close it where it starts another one"
#include "io_uring.h"

int main(int argc, char **argv)
{
	struct ring ring;

	if (argc == 1) {
		char *again[] = { argv[0], "again", NULL };

		if (!ring_poll(&ring, 10))
			zoo_skip("no io_uring");
		TRY(fcntl(ring.fd, F_SETFD, 0));
		TRY(execv("/proc/self/exe", again));
	}
	zoo_ready();
	zoo_wait();
	zoo_pass();
}
