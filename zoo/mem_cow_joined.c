// area: copy-on-write
// shows: what a child has parted of its memory is one again, and moves as one, though its parent has but a half of it
// modes: plain leave-running cow rounds compressed pidns ns userns sealed
// foreign: no CRIU's images do not say which mappings are one
#include "zoo.h"

#define SIZE (1 << 20)
#define HALF (SIZE / 2)
#define PAGE 4096

static char *memory[4];

/* What of its memory the child cannot write for a while. */
static void part(void)
{
	TRY(mprotect(memory[0], HALF, PROT_READ));
	TRY(mprotect(memory[1] + HALF, HALF, PROT_READ));
	TRY(mprotect(memory[2], HALF, PROT_NONE));
	TRY(mprotect(memory[3] + HALF - PAGE, PAGE, PROT_READ));
}

/* mremap(2) takes what is one mapping to the kernel, no more. */
static void check_joins(int i)
{
	char *area = memory[i];

	TRY(mprotect(area, SIZE, PROT_READ | PROT_WRITE));
	area[0] = area[0];
	area[SIZE - 1] = area[SIZE - 1];
	area = mremap(area, SIZE, 2 * SIZE, MREMAP_MAYMOVE);
	if (area == MAP_FAILED)
		zoo_fail("memory %d: mremap: %m", i);
	CHECK(zoo_filled(area, SIZE, i + 1));
	CHECK(area[SIZE] == 0);
}

int main(void)
{
	pid_t child;

	/* None of them touches another one: a gap is left on both sides. */
	for (int i = 0; i < 4; i++) {
		char *room = zoo_map(SIZE + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1);

		memory[i] = room + PAGE;
		TRY(mprotect(memory[i], SIZE, PROT_READ | PROT_WRITE));
		zoo_fill(memory[i], SIZE, i + 1);
	}
	child = TRY(fork());
	if (child == 0) {
		part();
		zoo_tell("parted");
		zoo_wait();
		for (int i = 0; i < 4; i++)
			check_joins(i);
		_exit(0);
	}
	zoo_await("parted");
	for (int i = 0; i < 4; i++)
		TRY(munmap(memory[i] + HALF, HALF));
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 0);
	for (int i = 0; i < 4; i++)
		CHECK(zoo_filled(memory[i], HALF, i + 1));
	zoo_pass();
}
