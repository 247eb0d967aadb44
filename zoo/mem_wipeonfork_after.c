// area: memory
// shows: an area that is to be wiped on fork before it has come is empty in children, and whole in its owner
// modes: lazy
// restore: --record-working-set=4
// varies: maps
#include "zoo.h"

#define SIZE 65536

int main(void)
{
	char *wiped = zoo_map(SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	char *kept = zoo_map(SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	static char zeroes[SIZE];
	pid_t child, grandchild;

	zoo_fill(wiped, SIZE, 5);
	zoo_fill(kept, SIZE, 6);
	zoo_ready();
	zoo_wait();
	/* What is not touched is not there: the working set is being recorded. */
	TRY(madvise(wiped, SIZE, MADV_WIPEONFORK));
	child = TRY(fork());
	if (child == 0) {
		grandchild = TRY(fork());
		CHECK(zoo_filled(kept, SIZE, 6));
		if (grandchild == 0)
			_exit(memcmp(wiped, zeroes, SIZE) != 0);
		CHECK_EXIT(grandchild, 0);
		_exit(memcmp(wiped, zeroes, SIZE) != 0);
	}
	CHECK_EXIT(child, 0);
	CHECK(zoo_filled(wiped, SIZE, 5) && zoo_filled(kept, SIZE, 6));
	zoo_pass();
}
