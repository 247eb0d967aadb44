/*
 * Keeps one number in memory and in files: some are written in turn, one is written through a
 * mapping, and one is another file each time. Before it changes anything it looks whether all
 * of them have the number that it has in memory, and ends if one has not. Beside them it has
 * SIZE MiB in a file that stays as it is.
 *
 *	ledger SIZE
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define FILES 4

static void fail(const char *what)
{
	perror(what);
	exit(2);
}

static void differs(const char *what, long there, long known)
{
	fprintf(stderr, "%s has %ld, and not %ld\n", what, there, known);
	exit(1);
}

static void bulk(long size)
{
	static char block[1 << 20];
	int fd = open("/bulk", O_WRONLY | O_CREAT | O_TRUNC, 0644);

	for (long i = 0; i < size; i++) {
		memset(block, (int)i + 1, sizeof(block));
		if (write(fd, block, sizeof(block)) != sizeof(block))
			fail("/bulk");
	}
	close(fd);
}

int main(int argc, char **argv)
{
	long known[FILES] = { 0 }, there, *mapped;
	char name[32], next[32];
	int files[FILES], fd;

	bulk(argc > 1 ? atol(argv[1]) : 0);
	for (int i = 0; i < FILES; i++) {
		snprintf(name, sizeof(name), "/file-%d", i);
		files[i] = open(name, O_RDWR | O_CREAT | O_TRUNC, 0644);
		if (pwrite(files[i], &known[i], sizeof(long), 0) != sizeof(long))
			fail(name);
	}
	fd = open("/mapped", O_RDWR | O_CREAT | O_TRUNC, 0644);
	if (ftruncate(fd, 4096) < 0)
		fail("/mapped");
	mapped = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (mapped == MAP_FAILED)
		fail("/mapped");
	close(creat("/turn-0", 0644));
	puts("begins");
	fflush(stdout);
	for (long number = 1;; number++) {
		for (int i = 0; i < FILES; i++) {
			if (pread(files[i], &there, sizeof(long), 0) != sizeof(long))
				fail("read");
			if (there != known[i])
				differs("a file", there, known[i]);
			if (pwrite(files[i], &number, sizeof(long), 0) != sizeof(long))
				fail("write");
			known[i] = number;
		}
		if (*mapped != number - 1)
			differs("/mapped", *mapped, number - 1);
		*mapped = number;
		snprintf(name, sizeof(name), "/turn-%ld", number - 1);
		snprintf(next, sizeof(next), "/turn-%ld", number);
		close(creat(next, 0644));
		if (unlink(name) < 0)
			fail(name);
	}
}
