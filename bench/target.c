// What the benchmarks dump: `target KIND N`, which prints "ready" and sleeps.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <linux/userfaultfd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static volatile uint64_t *counter;
static long written;

// Threads that touch memory: as many as keep the processors busy while some of them wait.
#define TOUCHERS 16

// Touches that take less than this had nothing to wait for.
#define NOTHING 2000ul
// The times of the others are counted by tenths of a millisecond, the last of which has all that took longer.
#define TENTHS 1000ul

// What they are told and tell, in a file: when to begin, how many pages they were through with in
// which time, and for how long they waited for how many of these.
static volatile struct {
	uint64_t go;
	struct {
		uint64_t pages, ns;
	} by[TOUCHERS];
	uint64_t waited[TENTHS];
} *work;
static char *touched;
static size_t share;
static int uffd;
// What the words of each share add up to that are touched, if that is known.
static size_t expected[TOUCHERS];
static int is_known;

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

static uint64_t now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000ull + time.tv_nsec;
}

// The i-th of 2^bits numbers in an order without a pattern.
static size_t shuffled(size_t i, int bits)
{
	size_t mask = ((size_t)1 << bits) - 1;

	for (int round = 0; round < 3; round++) {
		i = i * 0x9e3779b97f4a7c15u & mask;
		i ^= i >> (bits + 1) / 2;
	}
	return i;
}

// Waits until it is to begin; when that was.
static uint64_t begin(void)
{
	while (!work->go)
		usleep(500);
	return now();
}

static void done(size_t self, size_t pages, uint64_t start)
{
	work->by[self].pages = pages;
	__sync_synchronize();
	work->by[self].ns = now() - start;
}

static void count(uint64_t ns)
{
	uint64_t tenth = ns / 100000;

	if (ns >= NOTHING)
		__sync_fetch_and_add(&work->waited[tenth < TENTHS ? tenth : TENTHS - 1], 1);
}

// Reads a word of each page of its share of the memory.
static void *toucher(void *arg)
{
	size_t self = (size_t)arg, pages = share >> 12, sum = 0;
	int bits = 1;

	while ((size_t)1 << bits < pages)
		bits++;
	uint64_t start = begin(), before = start;
	for (size_t i = 0; i < (size_t)1 << bits; i++) {
		size_t page = shuffled(i, bits);
		if (page >= pages)
			continue;
		sum += *(volatile size_t *)(touched + self * share + (page << 12));
		uint64_t after = now();
		count(after - before);
		before = after;
	}
	if (is_known && sum != expected[self])
		abort();
	done(self, pages, start);
	return (void *)sum;
}

// Makes threads that begin when they are told to.
static void crowd(void *run(void *), char *memory, long mib)
{
	int fd = open("touches", O_RDWR | O_CREAT | O_TRUNC, 0600);
	pthread_t thread;

	if (fd < 0 || ftruncate(fd, sizeof *work))
		exit(1);
	work = mmap(0, sizeof *work, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (work == MAP_FAILED)
		exit(1);
	touched = memory;
	share = ((size_t)mib << 20) / TOUCHERS;
	for (size_t i = 0; i < TOUCHERS; i++)
		if (pthread_create(&thread, 0, run, (void *)i))
			exit(1);
}

// Memory that is as it was left whenever it is touched, or the program ends.
static void touchers(long mib)
{
	char *at = (char *)memory(mib, MADV_NOHUGEPAGE);
	size_t size = ((size_t)mib << 20) / TOUCHERS;

	for (size_t i = 0; i < TOUCHERS; i++)
		for (size_t page = 0; page < size >> 12; page++)
			expected[i] += *(size_t *)(at + i * size + (page << 12));
	is_known = 1;
	crowd(toucher, at, mib);
}

// N MiB whose pages are missing, and the userfaultfd for them.
static char *missing(long mib)
{
	size_t size = (size_t)mib << 20;
	char *memory = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register range = {
		.range = { (uintptr_t)memory, size },
		.mode = UFFDIO_REGISTER_MODE_MISSING,
	};

	uffd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
	if (memory == MAP_FAILED || uffd < 0 || ioctl(uffd, UFFDIO_API, &api) ||
	    ioctl(uffd, UFFDIO_REGISTER, &range))
		exit(1);
	return memory;
}

static char chunk[256 << 10] __attribute__((aligned(4096)));

static void put(uint64_t place, size_t size)
{
	struct uffdio_copy copy = { .dst = place, .src = (uintptr_t)chunk, .len = size };

	if (ioctl(uffd, UFFDIO_COPY, &copy))
		exit(1);
}

// Brings in a page for each fault.
static void *fills(void *arg)
{
	struct uffd_msg faults[16];
	ssize_t len;

	while ((len = read(uffd, faults, sizeof faults)) > 0)
		for (size_t i = 0; i < len / sizeof *faults; i++)
			put(faults[i].arg.pagefault.address & ~4095ul, 4096);
	return arg;
}

// The touches of `toucher`, served within the program by so many threads.
static void served(long mib, int threads)
{
	char *memory = missing(mib);
	pthread_t thread;

	memset(chunk, 1, sizeof chunk);
	for (int i = 0; i < threads; i++)
		if (pthread_create(&thread, 0, fills, 0))
			exit(1);
	crowd(toucher, memory, mib);
}

// The first thread brings in all that is missing.
static void *copier(void *arg)
{
	size_t self = (size_t)arg, size = self ? 0 : TOUCHERS * share;
	uint64_t start = begin();

	for (size_t at = 0; at < size; at += sizeof chunk)
		put((uintptr_t)touched + at, sizeof chunk);
	done(self, size >> 12, start);
	return arg;
}

static void copied(long mib)
{
	memset(chunk, 1, sizeof chunk);
	crowd(copier, missing(mib), mib);
}

static void processes(long count)
{
	for (long i = 1; i < count; i++)
		if (fork() == 0) {
			fclose(stdout);
			sleeper(0);
		}
}

// Another thread, and thirty files that nobody else has.
static void furnish(void)
{
	pthread_attr_t attr;
	pthread_t thread;

	for (int i = 0; i < 30; i++)
		if (open("/dev/null", O_RDONLY) < 0)
			exit(1);
	pthread_attr_init(&attr);
	pthread_attr_setstacksize(&attr, 64 << 10);
	if (pthread_create(&thread, &attr, sleeper, 0))
		exit(1);
}

static void family(long count)
{
	int done[2];
	char byte = 0;

	if (pipe(done))
		exit(1);
	for (long i = 1; i < count; i++)
		if (fork() == 0) {
			fclose(stdout);
			furnish();
			if (write(done[1], &byte, 1) != 1)
				exit(1);
			close(done[0]), close(done[1]);
			sleeper(0);
		}
	for (long i = 1; i < count; i++)
		if (read(done[0], &byte, 1) != 1)
			exit(1);
	close(done[0]), close(done[1]);
	furnish();
}

// A server with eight workers, which all have the same memory since they were forked.
static void workers(long mib)
{
	memory(mib, MADV_NOHUGEPAGE);
	processes(9);
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
	else if (!strcmp(kind, "workers"))
		workers(n);
	else if (!strcmp(kind, "writer"))
		writes(n);
	else if (!strcmp(kind, "toucher"))
		touchers(n);
	else if (!strcmp(kind, "served"))
		served(n, 1);
	else if (!strcmp(kind, "served-by-two"))
		served(n, 2);
	else if (!strcmp(kind, "copied"))
		copied(n);
	else if (!strcmp(kind, "processes"))
		processes(n);
	else if (!strcmp(kind, "family"))
		family(n);
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
