/* Has memory whose every page says where it belongs, and does to it what can be done while
 * its pages are missing. In its directory it makes the file "ready", waits for "gate", and
 * writes "ok" or what is wrong to "report". The arguments are how many pages there are, how
 * many children have them, too, and look at them, and how many of its own are others since. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096ul
#define WORDS (PAGE / sizeof(uint64_t))

static uint64_t pages;

static void finish(const char *what, uint64_t page)
{
	char text[100];
	int len = snprintf(text, sizeof(text), "%s %lu\n", what, page);
	int fd = open("report", O_WRONLY | O_CREAT | O_APPEND, 0600);
	if (fd < 0 || write(fd, text, len) != len)
		abort();
	_exit(strcmp(what, "ok") != 0);
}

/* Every third page was never written. */
static uint64_t word(uint64_t page, uint64_t at)
{
	return page % 3 == 2 ? 0 : (page + 1) * 0x9e3779b97f4a7c15ul + at;
}

static void check(const char *what, const uint64_t *base, uint64_t first, uint64_t count)
{
	for (uint64_t page = first; page < first + count; page++)
		for (uint64_t at = 0; at < WORDS; at += 61)
			if (base[(page - first) * WORDS + at] != word(page, at))
				finish(what, page);
}

static void check_zero(const char *what, const uint64_t *base, uint64_t count)
{
	for (uint64_t at = 0; at < count * WORDS; at += 64)
		if (base[at])
			finish(what, at / WORDS);
}

static void *reader(void *base)
{
	check("thread", (uint64_t *)base, 0, pages / 8);
	return NULL;
}

/* A child of a child, that outlives its parent. */
static void forks(uint64_t *base)
{
	pid_t pid = fork();
	if (pid == 0) {
		pid_t grandchild = fork();
		if (grandchild == 0) {
			/* Copies of its own: what it writes is nobody else's. */
			memset(base, 0xff, 4 * PAGE);
			check("grandchild", base + 8 * WORDS, 8, pages / 2 - 8);
			_exit(0);
		}
		check("child", base + pages / 4 * WORDS, pages / 4, pages / 4);
		int status;
		if (waitpid(grandchild, &status, 0) != grandchild || status)
			finish("grandchild's end", status);
		execl("/bin/true", "true", NULL);
		_exit(1);
	}
	check("parent", base, 0, pages / 4);
	int status;
	if (waitpid(pid, &status, 0) != pid || status)
		finish("child's end", status);
}

static void wait_for_gate(void)
{
	while (access("gate", F_OK))
		usleep(1000);
}

/* A child that has one page of its own, and all others as they are. */
static void relative(uint64_t *base, uint64_t number)
{
	if (fork())
		return;
	base[number * WORDS]++;
	wait_for_gate();
	base[number * WORDS]--;
	check("relative", base, 0, pages);
	_exit(0);
}

int main(int argc, char **argv)
{
	if (argc != 4)
		return 1;
	pages = strtoul(argv[1], NULL, 10);
	uint64_t relatives = strtoul(argv[2], NULL, 10);
	int prot = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
	uint64_t *base = mmap(NULL, pages * PAGE, prot, flags, -1, 0);
	char *place = mmap(NULL, pages * PAGE, PROT_NONE, flags, -1, 0);
	madvise(base, pages * PAGE, MADV_NOHUGEPAGE);
	for (uint64_t page = 0; page < pages; page++)
		for (uint64_t at = 0; page % 3 != 2 && at < WORDS; at++)
			base[page * WORDS + at] = word(page, at);
	/* What may not be written has pages, too. */
	mprotect(base + (pages - 8) * WORDS, 8 * PAGE, PROT_READ);
	for (uint64_t number = 0; number < relatives; number++)
		relative(base, number);
	uint64_t others = strtoul(argv[3], NULL, 10);
	for (uint64_t page = 0; page < others; page++)
		base[page * WORDS]++;
	if (creat("ready", 0600) < 0)
		return 1;
	wait_for_gate();
	for (int status; relatives > 0; relatives--)
		if (wait(&status) < 0 || status)
			finish("relative's end", status);
	for (uint64_t page = 0; page < others; page++)
		base[page * WORDS]--;

	uint64_t quarter = pages / 4;
	pthread_t threads[2];
	for (int i = 0; i < 2; i++)
		pthread_create(&threads[i], NULL, reader, base);
	/* The end first: all pages before it are missing still. */
	check("protected", base + (pages - 8) * WORDS, pages - 8, 8);
	/* The third quarter moves, in two steps; parts of the last one are dropped and unmapped. */
	uint64_t *moved = base + 2 * quarter * WORDS;
	moved = mremap(moved, quarter * PAGE, quarter * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, place);
	if (moved == MAP_FAILED)
		finish("mremap", 0);
	uint64_t half = quarter / 2;
	uint64_t *again = mremap(moved + half * WORDS, (quarter - half) * PAGE, (quarter - half) * PAGE,
				 MREMAP_MAYMOVE | MREMAP_FIXED, place + 2 * quarter * PAGE);
	if (again == MAP_FAILED)
		finish("second mremap", 0);
	uint64_t *last = base + 3 * quarter * WORDS;
	madvise(last, 64 * PAGE, MADV_DONTNEED);
	munmap(last + 64 * WORDS, 64 * PAGE);
	/* The system, too, reads what is missing. */
	int pipes[2];
	char copy[PAGE];
	if (pipe(pipes) || write(pipes[1], last + 130 * WORDS, PAGE) != PAGE ||
	    read(pipes[0], copy, PAGE) != PAGE)
		finish("pipe", 0);
	check("system call", (uint64_t *)copy, 3 * quarter + 130, 1);
	forks(base);
	check_zero("dropped", last, 64);
	check("moved", moved, 2 * quarter, half);
	check("moved twice", again, 2 * quarter + half, quarter - half);
	check("first half", base, 0, 2 * quarter);
	check("last quarter", last + 128 * WORDS, 3 * quarter + 128, quarter - 128);
	for (int i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
	finish("ok", pages);
}
