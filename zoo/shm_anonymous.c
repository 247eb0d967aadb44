// area: shared memory
// shows: a shared anonymous area seen by parent and child, with holes, moved, and mapped twice
// foreign: yes
#include "zoo.h"

#define MB (1ul << 20)

int main(void)
{
	char *area = zoo_map(16 * MB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1), *twice;
	volatile char *talk = zoo_map(4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1);
	pid_t child;

	zoo_fill(area, 16 * MB, 4);
	/* Mapping a second time: mremap with an old size of zero. */
	twice = mremap(area + 8 * MB, 0, 4 * MB, MREMAP_MAYMOVE);
	CHECK(twice != MAP_FAILED);
	child = TRY(fork());
	if (child == 0) {
		char *moved = mremap(area, 2 * MB, 2 * MB, MREMAP_MAYMOVE | MREMAP_FIXED,
				     zoo_map(2 * MB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1));

		TRY(munmap(area + 4 * MB, MB));
		zoo_tell("child");
		zoo_wait();
		while (talk[0] != 1)
			zoo_sleep_ms(1);
		CHECK_EQ(moved[10], 42);
		CHECK_EQ(area[9 * MB], 43);
		area[10 * MB] = 44;
		talk[0] = 2;
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK(zoo_filled(area, 16 * MB, 4));
	CHECK(memcmp(twice, area + 8 * MB, 4 * MB) == 0);
	area[10] = 42;
	twice[MB] = 43;
	talk[0] = 1;
	CHECK_EXIT(child, 0);
	CHECK_EQ(talk[0], 2);
	CHECK_EQ(area[10 * MB], 44);
	CHECK_EQ(twice[2 * MB], 44);
	zoo_pass();
}
