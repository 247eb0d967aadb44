// area: event descriptors
// shows: an epoll server that works for eight writers while it is dumped
// foreign: yes
// varies: fd
#include "zoo.h"
#include <sys/epoll.h>

#define WRITERS 8

int main(void)
{
	int set = TRY(epoll_create1(0)), pipes[WRITERS][2], open_ends = WRITERS;
	pid_t pids[WRITERS];
	uint32_t expected[WRITERS] = { 0 };

	for (int i = 0; i < WRITERS; i++) {
		struct epoll_event ev = { .events = EPOLLIN, .data.u32 = i };

		TRY(pipe(pipes[i]));
		if (!(pids[i] = TRY(fork()))) {
			for (int k = 0; k <= i; k++)
				close(pipes[k][0]);
			for (uint32_t word = 0; !zoo_go(); word++) {
				CHECK_EQ(write(pipes[i][1], &word, sizeof word), sizeof word);
				zoo_sleep_ms(1);
			}
			_exit(0);
		}
		TRY(close(pipes[i][1]));
		TRY(epoll_ctl(set, EPOLL_CTL_ADD, pipes[i][0], &ev));
	}
	for (bool told = false; open_ends;) {
		struct epoll_event got[4];
		int n = epoll_wait(set, got, 4, -1);

		if (n < 0)
			CHECK_EQ(errno, EINTR);
		for (int i = 0; i < n; i++) {
			uint32_t word, from = got[i].data.u32;
			ssize_t len = TRY(read(pipes[from][0], &word, sizeof word));

			if (len == 0) {
				TRY(close(pipes[from][0]));
				open_ends--;
				continue;
			}
			CHECK_EQ(len, sizeof word);
			CHECK_EQ(word, expected[from]);
			expected[from]++;
		}
		if (!told && expected[0] > 20) {
			zoo_ready();
			told = true;
		}
	}
	for (int i = 0; i < WRITERS; i++)
		CHECK_EXIT(pids[i], 0);
	zoo_pass();
}
