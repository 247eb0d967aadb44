/* Counts, and writes the count to a file that has room for it, which nothing else does. Two of it that ran at a time
 * would count twice, and one that came back from an older checkpoint would count back.
 *
 * The arguments are the file, the number of pages that it has, and how many of them it writes
 * before it counts on. Each page says what it should hold; one that does not ends the program. With a fourth one it
 * finds once that another one of it has counted on from where it was.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096ul
#define WORDS (PAGE / sizeof(uint64_t))

static void fail(const char *what)
{
	perror(what);
	abort();
}

int main(int argc, char **argv)
{
	if (argc != 4 && argc != 5)
		return 2;
	uint64_t pages = strtoul(argv[2], NULL, 10), writes = strtoul(argv[3], NULL, 10);
	int file = open(argv[1], O_RDWR | O_CREAT, 0644);
	if (file < 0)
		fail(argv[1]);
	uint64_t *memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE,
				MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint64_t *expected = calloc(pages, sizeof(*expected));
	if (memory == MAP_FAILED || !expected)
		fail("memory");
	for (uint64_t page = 0; page < pages; page++)
		memory[page * WORDS] = memory[page * WORDS + WORDS - 1] = expected[page] = page * 7 + 1;

	int may_be_behind = argc == 5;
	uint64_t seed = 1;
	for (uint64_t count = 1;; count++) {
		for (uint64_t i = 0; i < writes; i++) {
			seed = seed * 6364136223846793005ul + 1442695040888963407ul;
			uint64_t page = (seed >> 33) % pages;
			uint64_t *at = memory + page * WORDS;
			if (at[0] != expected[page] || at[WORDS - 1] != expected[page])
				abort();
			at[0] = at[WORDS - 1] = expected[page] = seed;
		}
		/* The one before is there, unless somebody else counts. */
		uint64_t before = 0;
		if (pread(file, &before, sizeof(before), 0) < 0)
			fail("pread");
		if (may_be_behind && before >= count) {
			count = before + 1;
			may_be_behind = 0;
		}
		if (before != count - 1)
			abort();
		if (pwrite(file, &count, sizeof(count), 0) != sizeof(count))
			fail("pwrite");
		struct timespec pause = { .tv_nsec = 1000000 };
		nanosleep(&pause, NULL);
	}
}
