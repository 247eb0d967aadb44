// area: pipes
// shows: a full and an empty pipe, of the usual size and of 1 MiB, with their content
// foreign: yes
#include "zoo.h"

static size_t fill(int fd)
{
	char block[4096];
	size_t total = 0;
	ssize_t n;

	TRY(fcntl(fd, F_SETFL, O_NONBLOCK));
	for (;; total += n) {
		for (size_t i = 0; i < sizeof block; i++)
			block[i] = (char)((total + i) * 7 % 251);
		n = write(fd, block, sizeof block);
		if (n < 0)
			break;
	}
	CHECK_EQ(errno, EAGAIN);
	return total;
}

int main(void)
{
	int pipes[3][2], size;
	size_t filled[2];

	for (int i = 0; i < 3; i++)
		TRY(pipe(pipes[i]));
	size = TRY(fcntl(pipes[1][1], F_SETPIPE_SZ, 1 << 20));
	TRY(fcntl(pipes[2][1], F_SETPIPE_SZ, 4096));
	for (int i = 0; i < 2; i++)
		filled[i] = fill(pipes[i][1]);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(fcntl(pipes[0][1], F_GETPIPE_SZ), 65536);
	CHECK_EQ(fcntl(pipes[1][1], F_GETPIPE_SZ), size);
	CHECK_EQ(fcntl(pipes[2][1], F_GETPIPE_SZ), 4096);
	for (int i = 0; i < 2; i++) {
		CHECK(write(pipes[i][1], "x", 1) < 0 && errno == EAGAIN);
		CHECK_EQ(fcntl(pipes[i][0], F_GETFL) & O_NONBLOCK, 0);
		TRY(close(pipes[i][1]));
		for (size_t at = 0; at < filled[i];) {
			unsigned char block[4096];
			ssize_t n = TRY(read(pipes[i][0], block, sizeof block));

			CHECK(n > 0);
			for (ssize_t k = 0; k < n; k++, at++)
				CHECK_EQ(block[k], at * 7 % 251);
		}
		CHECK_EQ(read(pipes[i][0], &size, 1), 0);
	}
	CHECK_EQ(write(pipes[2][1], "x", 1), 1);
	zoo_pass();
}
