// area: refusals
// shows: a Unix stream socket whose peer is outside of the tree is refused
// modes: plain leave-running
// expect: refused "outside"
#include "zoo.h"
#include <sys/socket.h>

int main(void)
{
	int pair[2];
	char c;

	TRY(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
	/* The peer's owner leaves the tree: its parent ends, and init takes it. */
	if (TRY(fork()) == 0) {
		pid_t parent = getpid();

		if (TRY(fork()) == 0) {
			close(pair[0]);
			TRY(setsid());
			WAIT_UNTIL(getppid() != parent);
			zoo_tell("outside");
			while (read(pair[1], &c, 1) != 1)
				;
			CHECK_EQ(write(pair[1], &c, 1), 1);
			_exit(0);
		}
		_exit(0);
	}
	TRY(wait(NULL));
	close(pair[1]);
	zoo_await("outside");
	zoo_ready();
	zoo_wait();
	CHECK_EQ(write(pair[0], "x", 1), 1);
	CHECK_EQ(read(pair[0], &c, 1), 1);
	zoo_pass();
}
