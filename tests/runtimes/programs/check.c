/* Keeps blocks of memory on the heap, checks and changes them all the time, and says so in a line for
 * each round. Built with AddressSanitizer, or run under Valgrind. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BLOCKS = 500, SIZE = 4096 };

struct block {
	long round;
	unsigned char bytes[SIZE];
};

static struct block *made(long round)
{
	struct block *block = malloc(sizeof(*block));

	if (!block)
		abort();
	block->round = round;
	memset(block->bytes, (int)(round & 0xff), SIZE);
	return block;
}

static void check(const struct block *block)
{
	for (int i = 0; i < SIZE; i++)
		if (block->bytes[i] != (block->round & 0xff))
			abort();
}

static void *beside(void *unused)
{
	volatile double sum = 0;

	(void)unused;
	for (long i = 1;; i++) {
		sum += 1.0 / (double)i;
		if (i % 1000 == 0)
			usleep(1000);
	}
	return NULL;
}

int main(void)
{
	struct block *blocks[BLOCKS];
	pthread_t thread;

	setvbuf(stdout, NULL, _IOLBF, 0);
	for (int i = 0; i < BLOCKS; i++)
		blocks[i] = made(i);
	if (pthread_create(&thread, NULL, beside, NULL))
		abort();
	for (long round = 1;; round++) {
		for (int i = 0; i < BLOCKS; i++) {
			check(blocks[i]);
			if (i % 50 == round % 50) {
				free(blocks[i]);
				blocks[i] = made(round);
			}
		}
		printf("%ld\n", round);
		usleep(5000);
	}
}
