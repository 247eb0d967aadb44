// area: pipes
// shows: a pipe in packet mode keeps the boundaries of what was written
// foreign: no CRIU's images do not have it
#include "zoo.h"

int main(void)
{
	int ends[2];
	char text[64];

	TRY(pipe2(ends, O_DIRECT));
	CHECK_EQ(write(ends[1], "one", 3), 3);
	CHECK_EQ(write(ends[1], "three", 5), 5);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(read(ends[0], text, sizeof text), 3);
	CHECK_EQ(read(ends[0], text, sizeof text), 5);
	CHECK(memcmp(text, "three", 5) == 0);
	CHECK_EQ(write(ends[1], "a", 1), 1);
	CHECK_EQ(write(ends[1], "b", 1), 1);
	CHECK_EQ(read(ends[0], text, sizeof text), 1);
	zoo_pass();
}
