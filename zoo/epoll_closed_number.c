// area: event descriptors
// shows: an epoll set that watches an open file whose number was closed, and several under one reused number; such a signalfd
// foreign: no CRIU's images have the numbers that watched files have now
#include "zoo.h"
#include <sys/epoll.h>
#include <sys/signalfd.h>

int main(void)
{
	int set = TRY(epoll_create1(0)), pipes[3][2], copies[3], number = 200;
	int of_signals = TRY(epoll_create1(0)), signals_fd;
	struct epoll_event got[8], ev = { .events = EPOLLIN };
	sigset_t signals;
	unsigned seen = 0;

	for (int i = 0; i < 3; i++) {
		ev.data.u64 = 1u << i;
		TRY(pipe(pipes[i]));
		/* The same number each time; the copy keeps the watched open file alive. */
		TRY(dup2(pipes[i][0], number));
		copies[i] = TRY(dup(pipes[i][0]));
		TRY(epoll_ctl(set, EPOLL_CTL_ADD, number, &ev));
		TRY(close(pipes[i][0]));
		TRY(close(number));
	}
	sigemptyset(&signals);
	sigaddset(&signals, SIGUSR1);
	TRY(sigprocmask(SIG_BLOCK, &signals, NULL));
	signals_fd = TRY(signalfd(-1, &signals, SFD_NONBLOCK));
	TRY(dup2(signals_fd, number));
	ev.data.u64 = 77;
	TRY(epoll_ctl(of_signals, EPOLL_CTL_ADD, number, &ev));
	TRY(close(number));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(epoll_wait(set, got, 8, 0), 0);
	for (int i = 0; i < 3; i++)
		CHECK_EQ(write(pipes[i][1], "x", 1), 1);
	CHECK_EQ(epoll_wait(set, got, 8, 1000), 3);
	for (int i = 0; i < 3; i++)
		seen |= got[i].data.u32;
	CHECK_EQ(seen, 7);
	CHECK(fcntl(number, F_GETFD) < 0);
	CHECK_EQ(read(copies[0], got, 1), 1);
	CHECK_EQ(epoll_wait(set, got, 8, 0), 2);
	CHECK_EQ(epoll_wait(of_signals, got, 8, 0), 0);
	TRY(kill(getpid(), SIGUSR1));
	CHECK_EQ(epoll_wait(of_signals, got, 8, 10000), 1);
	CHECK_EQ(got[0].data.u64, 77);
	zoo_pass();
}
