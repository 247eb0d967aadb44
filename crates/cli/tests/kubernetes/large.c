/* Has as many MiB of memory as its argument says, whose every word says where it belongs. Then it counts: for each count
 * it looks at one page that is none of those which it has looked at last, as somebody does who serves requests. */
#include <stdint.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define PAGE_WORDS (4096 / sizeof(uint64_t))

static uint64_t word(uint64_t at)
{
	uint64_t mixed = (at + 1) * 0x9e3779b97f4a7c15ul;
	return mixed ^ (mixed >> 29);
}

/* The first process of a container ends at no signal that it does not care for. */
static void leave(int signal)
{
	(void)signal;
	_exit(0);
}

int main(int argc, char **argv)
{
	if (argc != 2 || signal(SIGTERM, leave) == SIG_ERR)
		return 1;
	uint64_t words = (strtoull(argv[1], NULL, 10) << 20) / sizeof(uint64_t);
	uint64_t *memory = malloc(words * sizeof(uint64_t));
	if (!memory)
		return 1;
	for (uint64_t at = 0; at < words; at++)
		memory[at] = word(at);
	char began[64] = "";
	FILE *random = fopen("/proc/sys/kernel/random/uuid", "r");
	if (!random || fscanf(random, "%63s", began) != 1)
		return 1;
	uint64_t pages = words / PAGE_WORDS;
	for (uint64_t count = 1;; count++) {
		uint64_t page = word(count) % pages;
		for (uint64_t at = page * PAGE_WORDS; at < (page + 1) * PAGE_WORDS; at++)
			if (memory[at] != word(at)) {
				printf("page %lu is another\n", page);
				return 1;
			}
		printf("tick %lu %s\n", count, began);
		fflush(stdout);
		usleep(20000);
	}
}
