// area: memory
// shows: a droppable mapping comes back as one, and empty
// foreign: yes
#include "zoo.h"

#ifndef MAP_DROPPABLE
#define MAP_DROPPABLE 0x08
#endif

enum { SIZE = 65536 };

/* When this process was made: another time in a restored one. */
static long long made(void)
{
	char *at = strrchr(zoo_slurp("/proc/self/stat"), ')');
	long long time;

	/* Field 22; the parenthesis closes field 2. */
	for (int field = 2; field < 22; field++)
		at = strchr(at + 1, ' ');
	CHECK(sscanf(at, "%lld", &time) == 1);
	return time;
}

int main(void)
{
	static char whole[SIZE], zeroes[4096];
	char *area = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_DROPPABLE | MAP_ANONYMOUS, -1, 0);
	long long before = made();
	bool restored;

	if (area == MAP_FAILED)
		zoo_skip("no MAP_DROPPABLE");
	zoo_fill(area, SIZE, 3);
	zoo_fill(whole, SIZE, 3);
	zoo_ready();
	zoo_wait();
	restored = made() != before;
	/* Content may be dropped at any time: a page is as it was left, or empty. After a restore all
	 * of it is empty: what random numbers are made from must not be there twice. */
	for (int i = 0; i < SIZE; i += 4096) {
		bool empty = !memcmp(area + i, zeroes, 4096);

		CHECK(empty || !memcmp(area + i, whole + i, 4096));
		CHECK(empty || !restored);
	}
	area[0] = 1;
	CHECK_EQ(area[0], 1);
	zoo_pass();
}
