// area: copy-on-write
// shows: pages untouched since fork are still the same physical pages, written ones are not
// foreign: yes
// modes: -lazy
#include "frame.h"

#define PAGES 16

int main(void)
{
	char *area = zoo_map(PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	uint64_t *shared = zoo_map(PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1);
	pid_t child;

	TRY(madvise(area, PAGES * PAGE, MADV_NOHUGEPAGE));
	zoo_fill(area, PAGES * PAGE, 1);
	child = TRY(fork());
	if (child == 0) {
		for (int i = 0; i < PAGES; i += 4)
			zoo_fill(area + i * PAGE, PAGE, 100 + i);
		zoo_tell("child");
		zoo_wait();
		for (int i = 0; i < PAGES; i++)
			shared[i] = frame(area + i * PAGE);
		for (int i = 0; i < PAGES; i += 4)
			CHECK(zoo_filled(area + i * PAGE, PAGE, 100 + i));
		zoo_tell("frames");
		zoo_await("compared");
		_exit(0);
	}
	zoo_await("child");
	if (frame(area) == 0)
		zoo_skip("page frames are not shown");
	zoo_ready();
	zoo_wait();
	zoo_await("frames");
	CHECK(zoo_filled(area, PAGES * PAGE, 1));
	for (int i = 0; i < PAGES; i++)
		if (i % 4 == 0)
			CHECK(frame(area + i * PAGE) != shared[i]);
		else
			CHECK_EQ(frame(area + i * PAGE), shared[i]);
	zoo_tell("compared");
	CHECK_EXIT(child, 0);
	zoo_pass();
}
