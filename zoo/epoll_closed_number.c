// area: event descriptors
// shows: an epoll set that watches an open file whose number was closed, and several under one reused number
#include "zoo.h"
#include <sys/epoll.h>

int main(void)
{
	int set = TRY(epoll_create1(0)), pipes[3][2], copies[3], number = 200;
	struct epoll_event got[8];
	unsigned seen = 0;

	for (int i = 0; i < 3; i++) {
		struct epoll_event ev = { .events = EPOLLIN, .data.u64 = 1u << i };

		TRY(pipe(pipes[i]));
		/* The same number each time; the copy keeps the watched open file alive. */
		TRY(dup2(pipes[i][0], number));
		copies[i] = TRY(dup(pipes[i][0]));
		TRY(epoll_ctl(set, EPOLL_CTL_ADD, number, &ev));
		TRY(close(pipes[i][0]));
		TRY(close(number));
	}
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
	zoo_pass();
}
