// area: Unix sockets
// shows: data that runs through a ring of processes and socket pairs while it is dumped
// foreign: yes
// varies: fd
#include "zoo.h"
#include <sys/socket.h>

#define TASKS 3

int main(void)
{
	int pairs[TASKS][2];
	pid_t pids[TASKS];

	for (int i = 0; i < TASKS; i++)
		TRY(socketpair(AF_UNIX, i & 1 ? SOCK_SEQPACKET : SOCK_STREAM, 0, pairs[i]));
	for (int i = 1; i < TASKS; i++)
		if (!(pids[i] = TRY(fork()))) {
			uint32_t word;

			for (int k = 0; k < TASKS; k++) {
				if (k != i)
					close(pairs[k][0]);
				if (k != (i + 1) % TASKS)
					close(pairs[k][1]);
			}
			while (read(pairs[i][0], &word, sizeof word) == sizeof word)
				CHECK_EQ(write(pairs[(i + 1) % TASKS][1], &word, sizeof word), sizeof word);
			_exit(0);
		}
	for (int k = 0; k < TASKS; k++) {
		if (k != 0)
			close(pairs[k][0]);
		if (k != 1)
			close(pairs[k][1]);
	}
	for (uint32_t word = 0, back; word < 500 || !zoo_go(); word++) {
		CHECK_EQ(write(pairs[1][1], &word, sizeof word), sizeof word);
		CHECK_EQ(read(pairs[0][0], &back, sizeof back), sizeof back);
		CHECK_EQ(back, word);
		if (word == 200)
			zoo_ready();
	}
	TRY(close(pairs[1][1]));
	for (int i = 1; i < TASKS; i++)
		CHECK_EXIT(pids[i], 0);
	zoo_pass();
}
