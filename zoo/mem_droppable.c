// area: memory
// shows: a droppable mapping comes back as one
#include "zoo.h"

#ifndef MAP_DROPPABLE
#define MAP_DROPPABLE 0x08
#endif

int main(void)
{
	char *area = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_DROPPABLE | MAP_ANONYMOUS, -1, 0);

	if (area == MAP_FAILED)
		zoo_skip("no MAP_DROPPABLE");
	zoo_fill(area, 65536, 3);
	zoo_ready();
	zoo_wait();
	/* Content may be dropped at any time: either all is there, or a page is empty. */
	for (int i = 0; i < 65536; i += 4096) {
		static char zeroes[4096], whole[65536];

		zoo_fill(whole, 65536, 3);
		CHECK(!memcmp(area + i, zeroes, 4096) || !memcmp(area + i, whole + i, 4096));
	}
	area[0] = 1;
	zoo_pass();
}
