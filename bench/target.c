// What the benchmarks dump: `target KIND N`, which prints "ready" and sleeps.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

static void *sleeper(void *arg)
{
	for (;;)
		pause();
	return arg;
}

// N MiB that do not compress and are not alike, in pages as advised.
static void memory(long mib, int advice)
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
