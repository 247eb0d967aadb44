// area: memory
// shows: pages given back with MADV_FREE and MADV_DONTNEED do not hurt their neighbours
// foreign: yes
#include "zoo.h"

int main(void)
{
	char *area = zoo_map(1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);

	zoo_fill(area, 1 << 20, 1);
	TRY(madvise(area + (256 << 10), 256 << 10, MADV_FREE));
	TRY(madvise(area + (512 << 10), 256 << 10, MADV_DONTNEED));
	zoo_ready();
	zoo_wait();
	CHECK(zoo_filled(area, 256 << 10, 1));
	for (int i = 512 << 10; i < 768 << 10; i++)
		CHECK(area[i] == 0);
	zoo_pass();
}
