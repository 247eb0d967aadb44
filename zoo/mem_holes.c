// area: memory
// shows: a written private area of 64 MiB with PROT_NONE pages in it
// foreign: yes
#include "zoo.h"

#define PAGE 4096
#define SIZE (64ul << 20)

int main(void)
{
	char *area = zoo_map(SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	unsigned seed = 17;

	zoo_fill(area, SIZE, 1);
	for (int i = 0; i < 128; i++)
		TRY(mprotect(area + rand_r(&seed) % (SIZE / PAGE) * PAGE, PAGE, PROT_NONE));
	zoo_ready();
	zoo_wait();
	TRY(mprotect(area, SIZE, PROT_READ | PROT_WRITE));
	CHECK(zoo_filled(area, SIZE, 1));
	zoo_pass();
}
