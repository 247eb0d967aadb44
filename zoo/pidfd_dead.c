// area: pidfd
// shows: pidfds of a process that is gone and of a zombie, plain, not blocking, and for a thread, with their flags
// foreign: yes
// varies: fd
#include "zoo.h"
#include <poll.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

/* The number of pidfds of each process. */
#define KINDS 3

/* PIDFD_NONBLOCK and PIDFD_THREAD, which Linux has from 6.9 on. */
static const int flags[KINDS] = { 0, O_NONBLOCK, O_EXCL };

static int open_pid(pid_t pid, int kind)
{
	int fd = (int)syscall(SYS_pidfd_open, pid, flags[kind]);

	if (fd < 0 && errno == EINVAL && flags[kind] == O_EXCL)
		return -1;
	return (int)TRY(fd);
}

static int is_gone(int fd)
{
	return syscall(SYS_pidfd_send_signal, fd, 0, NULL, 0) < 0 && errno == ESRCH;
}

/* A pidfd that the kernel did not make is left out. */
static void check_ended(int fds[KINDS])
{
	for (int kind = 0; kind < KINDS; kind++) {
		struct pollfd pfd = { .fd = fds[kind], .events = POLLIN };

		if (fds[kind] < 0)
			continue;
		CHECK_EQ(poll(&pfd, 1, 10000), 1);
		CHECK_EQ(TRY(fcntl(fds[kind], F_GETFL)) & (O_NONBLOCK | O_EXCL), flags[kind]);
	}
}

static void check_gone(int fds[KINDS])
{
	for (int kind = 0; kind < KINDS; kind++)
		if (fds[kind] >= 0)
			CHECK(is_gone(fds[kind]));
}

int main(void)
{
	int fds[2][KINDS];
	pid_t pids[2];

	for (int i = 0; i < 2; i++) {
		pids[i] = TRY(fork());
		if (pids[i] == 0)
			_exit(4);
		for (int kind = 0; kind < KINDS; kind++)
			fds[i][kind] = open_pid(pids[i], kind);
		check_ended(fds[i]);
	}
	CHECK_EXIT(pids[0], 4);
	zoo_ready();
	zoo_wait();
	check_gone(fds[0]);
	check_ended(fds[0]);
	check_ended(fds[1]);
	CHECK_EXIT(pids[1], 4);
	check_gone(fds[1]);
	zoo_pass();
}
