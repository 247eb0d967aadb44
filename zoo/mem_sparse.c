// area: memory
// shows: a sparse private mapping of 10 GiB with two touched pages
// foreign: yes
#include "zoo.h"

#define SIZE (10ul << 30)

int main(void)
{
	char *area = zoo_map(SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
	unsigned char vec[2];

	TRY(madvise(area, SIZE, MADV_NOHUGEPAGE));
	zoo_fill(area, 4096, 1);
	zoo_fill(area + SIZE - 4096, 4096, 2);
	zoo_ready();
	zoo_wait();
	CHECK(zoo_filled(area, 4096, 1));
	CHECK(zoo_filled(area + SIZE - 4096, 4096, 2));
	TRY(mincore(area + SIZE / 2, 8192, vec));
	CHECK(!(vec[0] & 1));
	zoo_pass();
}
