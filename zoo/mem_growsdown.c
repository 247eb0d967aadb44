// area: memory
// shows: mappings that grow down, alone, split by a protection, and below a neighbour
// foreign: yes
#include "zoo.h"

#define PAGE 4096
#define FLAGS (MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN | MAP_FIXED)

int main(void)
{
	char *space = zoo_map(4096 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	char *alone = space + 1000 * PAGE, *split = space + 2000 * PAGE, *pair = space + 3000 * PAGE;

	TRY(munmap(space, 4096 * PAGE));
	CHECK(mmap(alone, 3 * PAGE, PROT_READ | PROT_WRITE, FLAGS, -1, 0) == alone);
	CHECK(mmap(split, 6 * PAGE, PROT_READ | PROT_WRITE, FLAGS, -1, 0) == split);
	CHECK(mmap(pair, 3 * PAGE, PROT_READ | PROT_WRITE, FLAGS, -1, 0) == pair);
	CHECK(mmap(pair + 4 * PAGE, 3 * PAGE, PROT_READ | PROT_WRITE, FLAGS, -1, 0) == pair + 4 * PAGE);
	zoo_fill(alone, 3 * PAGE, 1);
	zoo_fill(split, 6 * PAGE, 2);
	zoo_fill(pair, 3 * PAGE, 3);
	zoo_fill(pair + 4 * PAGE, 3 * PAGE, 4);
	/* Grow one by a page, by touching the page below. */
	*(volatile char *)(alone - 8) = 1;
	TRY(mprotect(split + 2 * PAGE, 2 * PAGE, PROT_READ));
	zoo_ready();
	zoo_wait();
	CHECK(zoo_filled(alone, 3 * PAGE, 1));
	CHECK(zoo_filled(split, 6 * PAGE, 2));
	CHECK(zoo_filled(pair, 3 * PAGE, 3));
	CHECK(zoo_filled(pair + 4 * PAGE, 3 * PAGE, 4));
	CHECK_EQ(alone[-8], 1);
	*(volatile char *)(alone - PAGE - 8) = 2;
	CHECK_EQ(alone[-PAGE - 8], 2);
	zoo_pass();
}
