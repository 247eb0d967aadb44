// area: pipes
// shows: a pipe with data whose writer is gone, one whose reader is gone, and one on which a task waits
// foreign: yes
#include "zoo.h"

int main(void)
{
	int data[2], broken[2], waited[2];
	char text[8];
	pid_t child;

	signal(SIGPIPE, SIG_IGN);
	TRY(pipe(data));
	TRY(pipe(broken));
	TRY(pipe(waited));
	CHECK_EQ(write(data[1], "left", 4), 4);
	TRY(close(data[1]));
	TRY(close(broken[0]));
	child = TRY(fork());
	if (child == 0) {
		close(waited[1]);
		close(broken[1]);
		zoo_tell("child");
		while (read(waited[0], text, 1) != 1)
			CHECK_EQ(errno, EINTR);
		_exit(text[0]);
	}
	zoo_await("child");
	zoo_sleep_ms(20);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(read(data[0], text, 8), 4);
	CHECK(memcmp(text, "left", 4) == 0);
	CHECK_EQ(read(data[0], text, 8), 0);
	CHECK(write(broken[1], "x", 1) < 0 && errno == EPIPE);
	CHECK_EQ(write(waited[1], "!", 1), 1);
	CHECK_EXIT(child, '!');
	zoo_pass();
}
