// What the benchmarks dump: `target KIND N`, which prints "ready" and sleeps.
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

static volatile uint64_t *counter;
static long written;

static void *sleeper(void *arg)
{
	for (;;)
		pause();
	return arg;
}

// N MiB that do not compress and are not alike, in pages as advised.
static uint64_t *memory(long mib, int advice)
{
	size_t size = (size_t)mib << 20, huge = 2 << 20;
	char *base = mmap(0, size + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint64_t *at = (uint64_t *)(((uintptr_t)base + huge - 1) & ~(huge - 1)), x = 88172645463325252u;

	if (base == MAP_FAILED || madvise(at, size, advice))
		exit(1);
	for (size_t i = 0; i < size / 8; i++) {
		x ^= x << 13, x ^= x >> 7, x ^= x << 17;
		at[i] = x;
	}
	return at;
}

// The same, but every other 256 bytes are zeros: what compresses to one half.
static void halves(long mib)
{
	char *at = (char *)memory(mib, MADV_NOHUGEPAGE);

	for (size_t i = 256; i < (size_t)mib << 20; i += 512)
		memset(at + i, 0, 256);
}

// Counts in a file, whose mapping is `counter`, the pages that it writes, one after the other.
static void *writer(void *arg)
{
	size_t pages = (size_t)written << 8;

	for (uint64_t n = 0;; n++) {
		memset((char *)arg + (n % pages << 12), (int)n, 4096);
		*counter = n;
	}
	return arg;
}

static void writes(long mib)
{
	int fd = open("counter", O_RDWR | O_CREAT | O_TRUNC, 0600);
	pthread_t thread;

	if (fd < 0 || ftruncate(fd, 4096))
		exit(1);
	counter = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	written = mib;
	if (counter == MAP_FAILED || pthread_create(&thread, 0, writer, memory(mib, MADV_NOHUGEPAGE)))
		exit(1);
}

static void processes(long count)
{
	for (long i = 1; i < count; i++)
		if (fork() == 0) {
			fclose(stdout);
			sleeper(0);
		}
}

static void threads(long count)
{
	pthread_attr_t attr;
	pthread_t thread;

	pthread_attr_init(&attr);
	pthread_attr_setstacksize(&attr, 64 << 10);
	for (long i = 1; i < count; i++)
		if (pthread_create(&thread, &attr, sleeper, 0))
			exit(1);
}

// N mappings of one page each, which the kernel cannot merge.
static void mappings(long count)
{
	char *base = mmap(0, (size_t)count << 12, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	for (long i = 0; i < count; i++) {
		base[i << 12] = (char)i;
		if (i % 2)
			mprotect(base + (i << 12), 4096, PROT_READ);
	}
}

int main(int argc, char **argv)
{
	const char *kind = argc > 2 ? argv[1] : "";
	long n = argc > 2 ? atol(argv[2]) : 0;

	if (!strcmp(kind, "small-pages"))
		memory(n, MADV_NOHUGEPAGE);
	else if (!strcmp(kind, "huge-pages"))
		memory(n, MADV_HUGEPAGE);
	else if (!strcmp(kind, "halves"))
		halves(n);
	else if (!strcmp(kind, "writer"))
		writes(n);
	else if (!strcmp(kind, "processes"))
		processes(n);
	else if (!strcmp(kind, "threads"))
		threads(n);
	else if (!strcmp(kind, "mappings"))
		mappings(n);
	else if (strcmp(kind, "sleep"))
		return 2;
	puts("ready");
	fclose(stdout);
	sleeper(0);
}
