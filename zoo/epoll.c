// area: event descriptors
// shows: an epoll set on pipes, an eventfd, a timerfd and another set, with user data and modes
// foreign: yes
#include "zoo.h"
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>

#define PIPES 100

static void add(int set, int fd, uint32_t events, uint64_t data)
{
	struct epoll_event ev = { .events = events, .data.u64 = data };

	TRY(epoll_ctl(set, EPOLL_CTL_ADD, fd, &ev));
}

int main(void)
{
	int set = TRY(epoll_create1(EPOLL_CLOEXEC)), outer = TRY(epoll_create1(0)), pipes[PIPES][2];
	int event = TRY(eventfd(0, EFD_NONBLOCK)), timer = TRY(timerfd_create(CLOCK_MONOTONIC, 0));
	struct itimerspec later = { .it_value = { 0, 1 } };
	struct epoll_event got[8];

	for (int i = 0; i < PIPES; i++) {
		TRY(pipe(pipes[i]));
		add(set, pipes[i][0], i & 1 ? EPOLLIN : EPOLLIN | EPOLLET, 0x1000000000 + i);
	}
	add(set, event, EPOLLIN | EPOLLONESHOT, 77);
	add(set, timer, EPOLLIN | EPOLLRDHUP, 88);
	add(outer, set, EPOLLIN, 99);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(fcntl(set, F_GETFD), FD_CLOEXEC);
	CHECK_EQ(epoll_wait(set, got, 8, 0), 0);
	CHECK_EQ(write(pipes[42][1], "x", 1), 1);
	CHECK_EQ(epoll_wait(outer, got, 8, 1000), 1);
	CHECK_EQ(got[0].data.u64, 99);
	CHECK_EQ(epoll_wait(set, got, 8, 0), 1);
	CHECK_EQ(got[0].data.u64, 0x1000000000 + 42);
	/* An edge is told once. */
	CHECK_EQ(epoll_wait(set, got, 8, 0), 0);
	TRY(eventfd_write(event, 1));
	CHECK_EQ(epoll_wait(set, got, 8, 0), 1);
	CHECK_EQ(got[0].data.u64, 77);
	CHECK_EQ(epoll_wait(set, got, 8, 0), 0);
	TRY(timerfd_settime(timer, 0, &later, NULL));
	CHECK_EQ(epoll_wait(set, got, 8, 10000), 1);
	CHECK_EQ(got[0].data.u64, 88);
	CHECK(epoll_ctl(set, EPOLL_CTL_ADD, pipes[7][0], &got[0]) < 0 && errno == EEXIST);
	zoo_pass();
}
