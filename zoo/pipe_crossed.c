// area: pipes
// shows: two processes with crossed ends of two pipes under the same numbers
// foreign: yes
#include "zoo.h"

int main(void)
{
	int a[2], b[2];
	char c = 0;
	pid_t child;

	TRY(pipe(a));
	TRY(pipe(b));
	child = TRY(fork());
	/* Number 100 is where one reads, 101 where one writes, for both. */
	TRY(dup2(child ? a[0] : b[0], 100));
	TRY(dup2(child ? b[1] : a[1], 101));
	TRY(close(a[0]));
	TRY(close(a[1]));
	TRY(close(b[0]));
	TRY(close(b[1]));
	if (child == 0) {
		zoo_tell("child");
		CHECK_EQ(read(100, &c, 1), 1);
		CHECK_EQ(c, 'p');
		CHECK_EQ(write(101, "c", 1), 1);
		CHECK_EQ(read(100, &c, 1), 0);
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK_EQ(write(101, "p", 1), 1);
	CHECK_EQ(read(100, &c, 1), 1);
	CHECK_EQ(c, 'c');
	TRY(close(101));
	CHECK_EXIT(child, 0);
	CHECK_EQ(read(100, &c, 1), 0);
	zoo_pass();
}
