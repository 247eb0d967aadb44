// area: copy-on-write
// shows: every order of writes before and after fork, in parent and child, gives each its own data
// foreign: yes
#include "zoo.h"

#define PAGE 4096
#define CASES 16

/* Bit 0: parent wrote before the fork; 1: parent after; 2: child after; 3: unmapped in the child. */
static uint64_t wanted(int n, bool child)
{
	if (child && (n & 4))
		return 300 + n;
	if (!child && (n & 2))
		return 200 + n;
	return n & 1 ? 100 + n : 0;
}

static void verify(char *area, bool child)
{
	static char zeroes[PAGE];

	for (int n = 0; n < CASES; n++) {
		uint64_t seed = wanted(n, child);

		if (child && (n & 8))
			continue;
		CHECK(seed ? zoo_filled(area + n * PAGE, PAGE, seed) : !memcmp(area + n * PAGE, zeroes, PAGE));
	}
}

int main(void)
{
	int fd = TRY(open("file", O_RDWR | O_CREAT, 0600));
	char *areas[2] = { zoo_map(CASES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1) };
	pid_t child;

	TRY(ftruncate(fd, CASES * PAGE));
	areas[1] = zoo_map(CASES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd);
	for (int a = 0; a < 2; a++)
		for (int n = 0; n < CASES; n++)
			if (n & 1)
				zoo_fill(areas[a] + n * PAGE, PAGE, 100 + n);
	child = TRY(fork());
	for (int a = 0; a < 2; a++)
		for (int n = 0; n < CASES; n++) {
			if (child ? n & 2 : n & 4)
				zoo_fill(areas[a] + n * PAGE, PAGE, (child ? 200 : 300) + n);
			if (!child && (n & 8))
				TRY(munmap(areas[a] + n * PAGE, PAGE));
		}
	if (child == 0) {
		zoo_tell("child");
		zoo_wait();
		verify(areas[0], true);
		verify(areas[1], true);
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	verify(areas[0], false);
	verify(areas[1], false);
	CHECK_EXIT(child, 0);
	zoo_pass();
}
