// area: pipes
// shows: duplicated and reopened ends of a pipe: each open file has its own O_NONBLOCK
// foreign: yes
#include "zoo.h"

int main(void)
{
	char path[64], c;
	int ends[2], copy, again, both;

	TRY(pipe2(ends, O_CLOEXEC));
	copy = TRY(dup(ends[0]));
	snprintf(path, sizeof path, "/proc/self/fd/%d", ends[0]);
	again = TRY(open(path, O_RDONLY | O_NONBLOCK));
	both = TRY(open(path, O_RDWR));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(fcntl(ends[0], F_GETFL) & O_NONBLOCK, 0);
	CHECK_EQ(fcntl(copy, F_GETFL) & O_NONBLOCK, 0);
	CHECK_EQ(fcntl(again, F_GETFL) & O_NONBLOCK, O_NONBLOCK);
	CHECK_EQ(fcntl(both, F_GETFL) & O_ACCMODE, O_RDWR);
	CHECK_EQ(fcntl(ends[0], F_GETFD), FD_CLOEXEC);
	CHECK_EQ(fcntl(copy, F_GETFD), 0);
	TRY(fcntl(copy, F_SETFL, O_NONBLOCK));
	CHECK_EQ(fcntl(ends[0], F_GETFL) & O_NONBLOCK, O_NONBLOCK);
	CHECK(read(again, &c, 1) < 0 && errno == EAGAIN);
	CHECK_EQ(write(both, "x", 1), 1);
	CHECK_EQ(read(again, &c, 1), 1);
	TRY(close(both));
	TRY(close(ends[1]));
	CHECK_EQ(read(again, &c, 1), 0);
	zoo_pass();
}
