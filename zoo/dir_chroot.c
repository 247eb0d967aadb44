// area: directories
// shows: a child in a changed root finds its way, with a descriptor from outside
// foreign: yes
#include "zoo.h"

int main(void)
{
	int outside, there[2];
	char text[8];
	pid_t child;

	TRY(mkdir("jail", 0755));
	TRY(mkdir("jail/home", 0755));
	close(TRY(open("jail/home/inside", O_CREAT | O_RDWR, 0600)));
	outside = TRY(open("outside", O_RDWR | O_CREAT, 0600));
	TRY(pipe(there));
	child = TRY(fork());
	if (child == 0) {
		int inside;

		TRY(close(there[0]));
		TRY(chroot("jail"));
		TRY(chdir("/home"));
		inside = TRY(open("/home/inside", O_RDWR));
		TRY(close(there[1]));
		/* The harness is out of reach here: wait for the parent's word on the descriptor. */
		while (pread(outside, text, 4, 0) != 4)
			zoo_sleep_ms(5);
		TRY(access("/home/inside", F_OK));
		TRY(access("inside", F_OK));
		CHECK_EQ(write(inside, "x", 1), 1);
		_exit(4);
	}
	TRY(close(there[1]));
	CHECK_EQ(read(there[0], text, 1), 0);
	TRY(close(there[0]));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(pwrite(outside, "now!", 4, 0), 4);
	CHECK_EXIT(child, 4);
	zoo_pass();
}
