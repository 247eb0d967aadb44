// area: pipes
// shows: two named pipes between two processes, ends open for reading, for writing, and for both
// foreign: yes
#include "zoo.h"

int main(void)
{
	int both, wo, ro;
	char text[8];
	pid_t child;

	TRY(mkfifo("one", 0640));
	TRY(mkfifo("two", 0600));
	both = TRY(open("one", O_RDWR));
	CHECK_EQ(write(both, "queued", 6), 6);
	child = TRY(fork());
	if (child == 0) {
		TRY(close(both));
		wo = TRY(open("two", O_WRONLY));
		ro = TRY(open("one", O_RDONLY | O_NONBLOCK));
		zoo_tell("child");
		zoo_wait();
		CHECK_EQ(read(ro, text, 6), 6);
		CHECK(memcmp(text, "queued", 6) == 0);
		CHECK_EQ(fcntl(ro, F_GETFL) & O_NONBLOCK, O_NONBLOCK);
		CHECK_EQ(write(wo, "answer", 6), 6);
		_exit(0);
	}
	ro = TRY(open("two", O_RDONLY));
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK_EQ(read(ro, text, 6), 6);
	CHECK(memcmp(text, "answer", 6) == 0);
	CHECK_EXIT(child, 0);
	CHECK_EQ(read(ro, text, 6), 0);
	zoo_pass();
}
