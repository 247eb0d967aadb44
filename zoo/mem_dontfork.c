// area: memory
// shows: an area not passed to children is whole in its owner and missing in them
// foreign: yes
#include "zoo.h"

int main(void)
{
	char *area = zoo_map(65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	unsigned char vec;
	pid_t before, after;

	TRY(madvise(area, 65536, MADV_DONTFORK));
	zoo_fill(area, 65536, 6);
	before = TRY(fork());
	if (before == 0) {
		zoo_tell("child");
		zoo_wait();
		_exit(!(mincore(area, 4096, &vec) < 0 && errno == ENOMEM));
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK(zoo_filled(area, 65536, 6));
	after = TRY(fork());
	if (after == 0)
		_exit(!(mincore(area, 4096, &vec) < 0 && errno == ENOMEM));
	CHECK_EXIT(before, 0);
	CHECK_EXIT(after, 0);
	zoo_pass();
}
