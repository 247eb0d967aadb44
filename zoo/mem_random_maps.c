// area: memory
// shows: a random sequence of mappings, protections and writes in parent and child ends the same
// foreign: yes
#include "zoo.h"

#define PAGE 4096
#define PAGES 4096

static void play(char *space, unsigned seed)
{
	for (int step = 0; step < 600; step++) {
		size_t start = rand_r(&seed) % PAGES, len = rand_r(&seed) % 32 + 1;
		char *at = space + start * PAGE;

		if (start + len > PAGES)
			len = PAGES - start;
		switch (rand_r(&seed) % 4) {
		case 0:
			CHECK(mmap(at, len * PAGE, PROT_READ | PROT_WRITE,
				   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at);
			break;
		case 1:
			TRY(mprotect(at, len * PAGE, PROT_READ));
			break;
		default:
			TRY(mprotect(at, len * PAGE, PROT_READ | PROT_WRITE));
			zoo_fill(at, len * PAGE, rand_r(&seed));
		}
	}
}

static uint64_t sum(char *space)
{
	uint64_t sum = 0;

	for (size_t i = 0; i < PAGES * PAGE / 8; i++)
		sum = sum * 31 + ((uint64_t *)space)[i];
	return sum;
}

int main(void)
{
	char *space = zoo_map(PAGES * PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	uint64_t *sums = zoo_map(PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1), before;
	pid_t child = TRY(fork());

	play(space, 99);
	before = sum(space);
	if (child == 0) {
		sums[0] = before;
		zoo_tell("child");
		zoo_wait();
		sums[1] = sum(space);
		_exit(0);
	}
	zoo_await("child");
	CHECK_EQ(sums[0], before);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(sum(space), before);
	CHECK_EXIT(child, 0);
	CHECK_EQ(sums[1], before);
	zoo_pass();
}
