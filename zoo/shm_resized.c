// area: shared memory
// shows: a child keeps resizing and writing a shared area that its parent adds up
// foreign: yes
// varies: maps
#include "zoo.h"

#define PAGE 4096

int main(void)
{
	int fd = TRY(memfd_create("grows", 0));
	unsigned char *area = zoo_map(64 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd);
	volatile unsigned *sum = zoo_map(PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1);
	unsigned seen = 0;
	pid_t child;

	TRY(ftruncate(fd, 64 * PAGE));
	child = TRY(fork());
	if (child == 0) {
		for (int round = 0; !zoo_go(); round++) {
			size_t now = (round % 60 + 1) * PAGE;
			unsigned char *again = mmap(NULL, now, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

			CHECK(again != MAP_FAILED);
			again = mremap(again, now, 64 * PAGE, MREMAP_MAYMOVE);
			CHECK(again != MAP_FAILED);
			*sum -= again[round % 64 * PAGE];
			again[round % 64 * PAGE] = (unsigned char)round;
			*sum += (unsigned char)round;
			TRY(munmap(again, 64 * PAGE));
		}
		_exit(0);
	}
	zoo_sleep_ms(20);
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 0);
	for (int i = 0; i < 64; i++)
		seen += area[i * PAGE];
	CHECK_EQ(seen, *sum);
	zoo_pass();
}
