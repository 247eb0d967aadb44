// area: event descriptors
// shows: an epoll descriptor that watches regular sockets of a child, shared over fork
// foreign: yes
#include "zoo.h"
#include <sys/epoll.h>
#include <sys/socket.h>

int main(void)
{
	int set = TRY(epoll_create1(0)), pair[2];
	struct epoll_event ev = { .events = EPOLLIN | EPOLLOUT | EPOLLET, .data.u64 = 5 }, got[2];
	pid_t child;

	TRY(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
	TRY(epoll_ctl(set, EPOLL_CTL_ADD, pair[0], &ev));
	child = TRY(fork());
	if (child == 0) {
		zoo_tell("child");
		zoo_wait();
		zoo_await("written");
		CHECK_EQ(epoll_wait(set, got, 2, 5000), 1);
		CHECK_EQ(got[0].data.u64, 5);
		CHECK(got[0].events & EPOLLIN);
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK_EQ(write(pair[1], "x", 1), 1);
	zoo_tell("written");
	CHECK_EXIT(child, 0);
	zoo_pass();
}
