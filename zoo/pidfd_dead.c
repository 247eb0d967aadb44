// area: pidfd
// shows: a pidfd of a process that is gone, and one of a zombie
// foreign: yes
// varies: fd
#include "zoo.h"
#include <poll.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

int main(void)
{
	struct pollfd pfd[2];
	int fds[2];
	pid_t pids[2];

	for (int i = 0; i < 2; i++) {
		pids[i] = TRY(fork());
		if (pids[i] == 0)
			_exit(4);
		fds[i] = (int)TRY(syscall(SYS_pidfd_open, pids[i], 0));
		pfd[i] = (struct pollfd){ .fd = fds[i], .events = POLLIN };
		CHECK_EQ(poll(&pfd[i], 1, 10000), 1);
	}
	CHECK_EXIT(pids[0], 4);
	zoo_ready();
	zoo_wait();
	CHECK(syscall(SYS_pidfd_send_signal, fds[0], 0, NULL, 0) < 0 && errno == ESRCH);
	CHECK_EQ(poll(pfd, 2, 0), 2);
	CHECK_EXIT(pids[1], 4);
	CHECK(syscall(SYS_pidfd_send_signal, fds[1], 0, NULL, 0) < 0 && errno == ESRCH);
	zoo_pass();
}
