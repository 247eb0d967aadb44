// area: pipes
// shows: data that runs in a loop through four processes is neither lost nor changed
// foreign: yes
// varies: fd
#include "zoo.h"

#define TASKS 4

int main(void)
{
	int pipes[TASKS][2];
	pid_t pids[TASKS];

	for (int i = 0; i < TASKS; i++)
		TRY(pipe(pipes[i]));
	for (int i = 1; i < TASKS; i++)
		if (!(pids[i] = TRY(fork()))) {
			uint32_t word;
			ssize_t n;

			for (int k = 0; k < TASKS; k++) {
				if (k != i)
					close(pipes[k][0]);
				if (k != (i + 1) % TASKS)
					close(pipes[k][1]);
			}
			while ((n = read(pipes[i][0], &word, sizeof word)) == sizeof word)
				CHECK_EQ(write(pipes[(i + 1) % TASKS][1], &word, sizeof word), sizeof word);
			_exit(n != 0);
		}
	for (int k = 0; k < TASKS; k++) {
		if (k != 0)
			close(pipes[k][0]);
		if (k != 1)
			close(pipes[k][1]);
	}
	for (uint32_t word = 0, back; word < 500 || !zoo_go(); word++) {
		CHECK_EQ(write(pipes[1][1], &word, sizeof word), sizeof word);
		CHECK_EQ(read(pipes[0][0], &back, sizeof back), sizeof back);
		CHECK_EQ(back, word);
		if (word == 200)
			zoo_ready();
	}
	TRY(close(pipes[1][1]));
	for (int i = 1; i < TASKS; i++)
		CHECK_EXIT(pids[i], 0);
	zoo_pass();
}
