// area: timers
// shows: a task inside of poll with a timeout: it ends, and its descriptor still wakes it
// foreign: yes
#include "zoo.h"
#include <poll.h>

int main(void)
{
	int ends[2];
	pid_t child;

	TRY(pipe(ends));
	child = TRY(fork());
	if (child == 0) {
		struct pollfd pfd = { .fd = ends[0], .events = POLLIN };
		int n;

		zoo_tell("child");
		/* May be interrupted by the restore; must not time out or report what is not there. */
		while ((n = poll(&pfd, 1, 60000)) < 0)
			CHECK_EQ(errno, EINTR);
		CHECK_EQ(n, 1);
		_exit(0);
	}
	zoo_await("child");
	zoo_sleep_ms(20);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(TRY(waitpid(child, NULL, WNOHANG)), 0);
	CHECK_EQ(write(ends[1], "x", 1), 1);
	CHECK_EXIT(child, 0);
	zoo_pass();
}
