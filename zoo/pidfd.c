// area: pidfd
// shows: pidfds of oneself, a child and a grandchild, one got through pidfd_getfd, and one that does not block
// foreign: yes
// varies: fd
#include "zoo.h"
#include <poll.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#define SYS_pidfd_getfd 438
#endif

/* PIDFD_NONBLOCK is O_NONBLOCK. */
static int open_pid(pid_t pid, int flags)
{
	return (int)TRY(syscall(SYS_pidfd_open, pid, flags));
}

int main(void)
{
	int self = open_pid(getpid(), 0), child_fd, grandchild_fd, copy;
	struct pollfd pfd;
	siginfo_t info;
	pid_t child = TRY(fork()), grandchild;
	char path[64];

	if (child == 0) {
		grandchild = TRY(fork());
		if (grandchild == 0)
			for (;;)
				pause();
		snprintf(path, sizeof path, "%d", grandchild);
		zoo_write("child", path);
		_exit(zoo_reap(grandchild) & 0x7f);
	}
	zoo_await("child");
	grandchild = atoi(zoo_slurp(zoo_path("child")));
	child_fd = open_pid(child, 0);
	grandchild_fd = open_pid(grandchild, O_NONBLOCK);
	copy = (int)TRY(syscall(SYS_pidfd_getfd, self, child_fd, 0));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(TRY(fcntl(child_fd, F_GETFL)) & O_NONBLOCK, 0);
	CHECK_EQ(TRY(fcntl(grandchild_fd, F_GETFL)) & O_NONBLOCK, O_NONBLOCK);
	TRY(syscall(SYS_pidfd_send_signal, self, 0, NULL, 0));
	TRY(syscall(SYS_pidfd_send_signal, copy, 0, NULL, 0));
	snprintf(path, sizeof path, "/proc/self/fdinfo/%d", grandchild_fd);
	CHECK_EQ(atoi(strstr(zoo_slurp(path), "Pid:") + 4), grandchild);
	TRY(syscall(SYS_pidfd_send_signal, grandchild_fd, SIGTERM, NULL, 0));
	pfd = (struct pollfd){ .fd = child_fd, .events = POLLIN };
	CHECK_EQ(poll(&pfd, 1, 10000), 1);
	CHECK_EQ(waitid(P_PIDFD, child_fd, &info, WEXITED), 0);
	CHECK_EQ(info.si_pid, child);
	CHECK_EQ(info.si_status, SIGTERM);
	zoo_pass();
}
