// area: descriptors in flight
// shows: sockets queued inside of each other, and an epoll set that watches the socket it is queued in
// foreign: yes
#include "zoo.h"
#include "scm.h"
#include <sys/epoll.h>

int main(void)
{
	int a[2], b[2], set = TRY(epoll_create1(0)), inner, got;
	struct epoll_event ev = { .events = EPOLLIN, .data.u64 = 6 };
	char c;

	TRY(socketpair(AF_UNIX, SOCK_DGRAM, 0, a));
	TRY(socketpair(AF_UNIX, SOCK_DGRAM, 0, b));
	TRY(epoll_ctl(set, EPOLL_CTL_ADD, a[0], &ev));
	CHECK_EQ(write(b[1], "deep", 4), 4);
	send_fd(a[1], b[0]);
	send_fd(a[1], set);
	TRY(close(b[0]));
	TRY(close(set));
	zoo_ready();
	zoo_wait();
	inner = recv_fd(a[0]);
	CHECK_EQ(read(inner, &c, 1), 1);
	CHECK_EQ(c, 'd');
	got = recv_fd(a[0]);
	CHECK_EQ(epoll_wait(got, &ev, 1, 0), 0);
	CHECK_EQ(write(a[1], "x", 1), 1);
	CHECK_EQ(epoll_wait(got, &ev, 1, 1000), 1);
	CHECK_EQ(ev.data.u64, 6);
	CHECK_EQ(write(b[1], "again", 5), 5);
	CHECK_EQ(read(inner, &c, 1), 1);
	CHECK_EQ(c, 'a');
	zoo_pass();
}
