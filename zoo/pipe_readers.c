// area: pipes
// shows: a writer with several readers of one pipe
// foreign: yes
#include "zoo.h"

int main(void)
{
	int ends[2], back[2];
	const char *names[] = { "first", "second", "third", "fourth" };
	pid_t pids[4];
	unsigned sum = 0, word;

	TRY(pipe(ends));
	TRY(pipe(back));
	for (int i = 0; i < 4; i++)
		if (!(pids[i] = TRY(fork()))) {
			ssize_t n;

			close(ends[1]);
			zoo_tell(names[i]);
			sum = 0;
			while ((n = read(ends[0], &word, sizeof word)) == sizeof word)
				sum += word;
			CHECK_EQ(n, 0);
			CHECK_EQ(write(back[1], &sum, sizeof sum), sizeof sum);
			_exit(0);
		}
	close(ends[0]);
	for (int i = 0; i < 4; i++)
		zoo_await(names[i]);
	for (word = 1; word <= 500; word++)
		CHECK_EQ(write(ends[1], &word, sizeof word), sizeof word);
	zoo_ready();
	zoo_wait();
	for (; word <= 1000; word++)
		CHECK_EQ(write(ends[1], &word, sizeof word), sizeof word);
	close(ends[1]);
	for (int i = 0; i < 4; i++) {
		CHECK_EXIT(pids[i], 0);
		CHECK_EQ(read(back[0], &word, sizeof word), sizeof word);
		sum += word;
	}
	CHECK_EQ(sum, 500500);
	zoo_pass();
}
