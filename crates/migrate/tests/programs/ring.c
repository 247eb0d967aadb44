/* Processes that pass a number on by pipes, each to the next, and add one to it. The first counts the rounds in a file
 * that has room for the count. One that gets another number than it should, or finds its memory changed, ends, and all
 * others with it.
 *
 * The arguments are the file and the number of processes.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define WORDS (16 * 4096 / sizeof(uint64_t))

static void fail(const char *what)
{
	perror(what);
	abort();
}

/* What process `index` of `count` does, of which the last one closes the ring. */
static void pass_on(uint64_t index, uint64_t count, int from, int to, int file)
{
	uint64_t *own = mmap(NULL, WORDS * sizeof(*own), PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (own == MAP_FAILED)
		fail("mmap");
	for (uint64_t word = 0; word < WORDS; word++)
		own[word] = index * WORDS + word;
	for (uint64_t round = 0;; round++) {
		uint64_t number = round * count, word = round % WORDS;
		if (index > 0 || round > 0) {
			/* Who is before it has ended. */
			if (read(from, &number, sizeof(number)) != sizeof(number))
				_exit(1);
			if (number != round * count + index || own[word] != index * WORDS + word)
				abort();
		}
		if (index == 0) {
			struct timespec pause = { .tv_nsec = 5000000 };
			if (pwrite(file, &round, sizeof(round), 0) != sizeof(round))
				fail("pwrite");
			nanosleep(&pause, NULL);
		}
		number++;
		if (write(to, &number, sizeof(number)) != sizeof(number))
			_exit(1);
	}
}

int main(int argc, char **argv)
{
	if (argc != 3)
		return 2;
	uint64_t count = strtoul(argv[2], NULL, 10);
	int file = open(argv[1], O_RDWR | O_CREAT, 0644), first[2], from, next[2];
	if (file < 0)
		fail(argv[1]);
	if (pipe(first))
		fail("pipe");
	from = first[0];
	for (uint64_t index = count - 1; index > 0; index--) {
		/* The last one, which is born first, leads back to the first. */
		if (pipe(next))
			fail("pipe");
		pid_t child = fork();
		if (child < 0)
			fail("fork");
		if (!child) {
			/* Only the first is looked for by its name. */
			memset(argv[0], 'm', strlen(argv[0]));
			close(next[1]);
			if (index < count - 1)
				close(from);
			pass_on(index, count, next[0], first[1], -1);
		}
		close(next[0]);
		close(first[1]);
		first[1] = next[1];
	}
	pass_on(0, count, from, first[1], file);
}
