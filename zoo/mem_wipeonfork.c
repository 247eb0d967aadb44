// area: memory
// shows: an area wiped on fork keeps its content over the restore, and is empty in children
// foreign: yes
#include "zoo.h"

int main(void)
{
	char *area = zoo_map(65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	static char zeroes[65536];
	pid_t before, after;

	TRY(madvise(area, 65536, MADV_WIPEONFORK));
	zoo_fill(area, 65536, 5);
	before = TRY(fork());
	if (before == 0) {
		zoo_tell("child");
		zoo_wait();
		_exit(memcmp(area, zeroes, 65536) != 0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK(zoo_filled(area, 65536, 5));
	after = TRY(fork());
	if (after == 0)
		_exit(memcmp(area, zeroes, 65536) != 0);
	CHECK_EXIT(before, 0);
	CHECK_EXIT(after, 0);
	zoo_pass();
}
