// area: directories
// shows: a child in a changed root finds its way, with a descriptor from outside
// foreign: yes
#include "zoo.h"

int main(void)
{
	int outside;
	char text[8];
	pid_t child;

	TRY(mkdir("jail", 0755));
	TRY(mkdir("jail/home", 0755));
	close(TRY(open("jail/home/inside", O_CREAT | O_RDWR, 0600)));
	outside = TRY(open("outside", O_RDWR | O_CREAT, 0600));
	child = TRY(fork());
	if (child == 0) {
		int inside;

		zoo_tell("child");
		TRY(chroot("jail"));
		TRY(chdir("/home"));
		inside = TRY(open("/home/inside", O_RDWR));
		/* The harness is out of reach here: wait for the parent's word on the descriptor. */
		while (pread(outside, text, 4, 0) != 4)
			zoo_sleep_ms(5);
		TRY(access("/home/inside", F_OK));
		TRY(access("inside", F_OK));
		CHECK_EQ(write(inside, "x", 1), 1);
		_exit(4);
	}
	zoo_await("child");
	zoo_sleep_ms(20);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(pwrite(outside, "now!", 4, 0), 4);
	CHECK_EXIT(child, 4);
	zoo_pass();
}
