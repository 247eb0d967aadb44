// area: event descriptors
// shows: epoll sets that are woken by signals, by way of a signalfd: of a process and of its child
// foreign: yes
#include "zoo.h"
#include <sys/epoll.h>
#include <sys/signalfd.h>

static int watch(int fd, sigset_t *signals)
{
	struct epoll_event ev = { .events = EPOLLIN, .data.u64 = 0x5000000000 + fd };
	int set = TRY(epoll_create1(0));

	TRY(sigprocmask(SIG_BLOCK, signals, NULL));
	TRY(epoll_ctl(set, EPOLL_CTL_ADD, fd, &ev));
	return set;
}

/* What is pending is told; then what is sent. */
static void check(int set, int fd)
{
	struct signalfd_siginfo info;
	struct epoll_event got[2];

	CHECK_EQ(epoll_wait(set, got, 2, 10000), 1);
	CHECK_EQ(got[0].data.u64, 0x5000000000 + fd);
	CHECK_EQ(read(fd, &info, sizeof info), sizeof info);
	CHECK_EQ(info.ssi_signo, SIGUSR2);
	CHECK_EQ(epoll_wait(set, got, 2, 0), 0);
	TRY(kill(getpid(), SIGUSR1));
	CHECK_EQ(epoll_wait(set, got, 2, 10000), 1);
	CHECK_EQ(got[0].data.u64, 0x5000000000 + fd);
	CHECK_EQ(read(fd, &info, sizeof info), sizeof info);
	CHECK_EQ(info.ssi_signo, SIGUSR1);
}

int main(void)
{
	int set, fd;
	sigset_t signals;
	pid_t child;

	sigemptyset(&signals);
	sigaddset(&signals, SIGUSR1);
	sigaddset(&signals, SIGUSR2);
	fd = TRY(signalfd(-1, &signals, SFD_NONBLOCK));
	set = watch(fd, &signals);
	child = TRY(fork());
	if (child == 0) {
		fd = TRY(signalfd(-1, &signals, SFD_NONBLOCK));
		set = watch(fd, &signals);
		TRY(kill(getpid(), SIGUSR2));
		zoo_tell("child");
		zoo_wait();
		check(set, fd);
		_exit(0);
	}
	zoo_await("child");
	TRY(kill(getpid(), SIGUSR2));
	zoo_ready();
	zoo_wait();
	check(set, fd);
	CHECK_EXIT(child, 0);
	zoo_pass();
}
