// An application with memory, for snapshots: `app PAGES SEED EVERY OTHER` fills PAGES pages from
// SEED, each EVERYth of them from OTHER, and answers at /app.sock; `app ask WORDS` asks there. Where
// NOTIFY_SOCKET names a socket it says there that it is ready.
//
// `app PAGES SEED EVERY OTHER CHILDREN OWN DEPTH` has children, 1 to CHILDREN: each of them overwrites
// every second page, and fills OWN pages that only it has. They have children of their own, up to
// DEPTH generations: the first of 2 is 21. With the further word `full` no large part of the address space is
// left free; with `orphans` each child leaves the leader of its session behind as a zombie; with `kinds` each
// has STACK pages on its stack, and all share memory of which SHARED pages of SHARED * 8 are used; with `parted`
// each overwrites the first half of the pages only, and cannot write these any more. They answer at
// /app-NUMBER.sock; `app ask-of NUMBER WORDS` asks there.
//
// Where OUTSIDE has two ports of this host, it is connected to the first, and listens at the second.
#define _GNU_SOURCE
#include <alloca.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096
#define STACK 1024
#define SHARED 256
#define INTERVAL 10000000

static struct sockaddr_un place = { .sun_family = AF_UNIX, .sun_path = "/app.sock" };

static uint64_t next(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

// A quarter of the page is noise, the rest says which page it is.
static void fill(uint64_t *page, uint64_t seed, uint64_t number)
{
	uint64_t state = seed * 0x9e3779b97f4a7c15 + number + 1;

	for (int i = 0; i < PAGE / 8; i++)
		page[i] = i % 4 == 0 ? next(&state) : seed + number;
}

static int notify(const char *where)
{
	static const char *const said[] = { "STATUS=almost\n", "STATUS=warm\nREADY=1\n" };
	struct sockaddr_un place = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_DGRAM, 0);

	strncpy(place.sun_path, where, sizeof(place.sun_path) - 1);
	for (int i = 0; i < 2; i++)
		if (sendto(fd, said[i], strlen(said[i]), 0, (void *)&place, sizeof(place)) < 0)
			return 1;
	return close(fd);
}

// The place of the process with this number; the first one is 0.
static void settle(unsigned long number)
{
	if (number)
		snprintf(place.sun_path, sizeof(place.sun_path), "/app-%lu.sock", number);
}

// A child may have hardly more memory than it has.
static int limit(void)
{
	unsigned long pages;
	FILE *file = fopen("/proc/self/statm", "r");

	if (!file || fscanf(file, "%lu", &pages) != 1 || fclose(file))
		return -1;
	struct rlimit most = { (pages + 1024) * PAGE, (pages + 1024) * PAGE };
	return setrlimit(RLIMIT_AS, &most) || setrlimit(RLIMIT_DATA, &most);
}

// Makes children, one after the other was ready. Returns the number of the process that it returns
// in; in a child *ready is where it is to say that it is.
static unsigned long breed(unsigned long number, unsigned long children, int orphans, int *ready)
{
	for (unsigned long child = 1; child <= children; child++) {
		int ends[2];
		char byte;

		if (pipe(ends))
			exit(1);
		pid_t pid = fork();
		if (pid == 0) {
			close(ends[0]);
			if (*ready >= 0)
				close(*ready);
			*ready = ends[1];
			if (orphans && (setsid() < 0 || fork() != 0))
				_exit(0);
			return number * 10 + child;
		}
		close(ends[1]);
		if (pid < 0 || read(ends[0], &byte, 1) != 1)
			exit(1);
		close(ends[0]);
	}
	return number;
}

// Connects to the first port that is named, and listens at the second. Returns the connection.
static int reach(const char *ports)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	int listener = socket(AF_INET, SOCK_STREAM, 0), outside = socket(AF_INET, SOCK_STREAM, 0);
	unsigned short to, own;

	if (sscanf(ports, "%hu %hu", &to, &own) != 2)
		return -1;
	at.sin_port = htons(to);
	if (connect(outside, (void *)&at, sizeof(at)))
		return -1;
	at.sin_port = htons(own);
	return bind(listener, (void *)&at, sizeof(at)) || listen(listener, 1) ? -1 : outside;
}

static uint64_t now_by(clockid_t clock)
{
	struct timespec now;

	clock_gettime(clock, &now);
	return now.tv_sec * 1000000000ULL + now.tv_nsec;
}

// What a timer that fires every INTERVAL has to say, which is set when this is asked first: the time, how
// long ago that was, how often it has fired, and the time that counts suspends, too.
static void tell_time(int fd)
{
	struct itimerspec every = { { .tv_nsec = INTERVAL }, { .tv_nsec = INTERVAL } };
	static uint64_t begin, fired;
	static int timer = -1;
	uint64_t more = 0;

	if (timer < 0) {
		timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
		begin = now_by(CLOCK_MONOTONIC);
		timerfd_settime(timer, 0, &every, NULL);
	}
	if (read(timer, &more, sizeof(more)) > 0)
		fired += more;
	uint64_t at = now_by(CLOCK_MONOTONIC);
	dprintf(fd, "%llu %llu %llu %llu", (unsigned long long)at, (unsigned long long)(at - begin),
		(unsigned long long)fired, (unsigned long long)now_by(CLOCK_BOOTTIME));
}

// The number of this start, mapped once as a library does it that makes random numbers.
static volatile const uint32_t *map_generation(void)
{
	int fd = open("/dev/sysgenid", O_RDONLY | O_CLOEXEC);
	void *at = fd < 0 ? MAP_FAILED : mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, 0);

	if (fd >= 0)
		close(fd);
	return at == MAP_FAILED ? NULL : at;
}

// How often the mark of a restore was written since this was asked first.
static int heard(void)
{
	static int watch = -1, times;
	char events[4096] __attribute__((aligned(8)));
	ssize_t len;

	if (watch < 0) {
		watch = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
		if ((mkdir("/run/torpor", 0755) && errno != EEXIST) ||
		    inotify_add_watch(watch, "/run/torpor", IN_CLOSE_WRITE) < 0)
			return -1;
	}
	while ((len = read(watch, events, sizeof(events))) > 0)
		for (char *at = events; at < events + len;) {
			struct inotify_event *event = (void *)at;
			times += event->len && !strcmp(event->name, "restored");
			at += sizeof(*event) + event->len;
		}
	return times;
}

static int ask(int from, int argc, char **argv)
{
	char words[256] = "";
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);

	for (int i = from; i < argc; i++)
		snprintf(words + strlen(words), sizeof(words) - strlen(words), "%s ", argv[i]);
	if (connect(fd, (void *)&place, sizeof(place)) || write(fd, words, strlen(words)) < 0)
		return 1;
	ssize_t len = read(fd, words, sizeof(words) - 1);
	if (len <= 0)
		return 1;
	words[len] = 0;
	puts(words);
	return 0;
}

int main(int argc, char **argv)
{
	if (argc > 2 && !strcmp(argv[1], "ask"))
		return ask(2, argc, argv);
	if (argc > 3 && !strcmp(argv[1], "ask-of")) {
		settle(strtoul(argv[2], NULL, 0));
		return ask(3, argc, argv);
	}
	size_t pages = strtoul(argv[1], NULL, 0);
	uint64_t seed = strtoul(argv[2], NULL, 0), every = strtoul(argv[3], NULL, 0);
	uint64_t other = strtoul(argv[4], NULL, 0);
	unsigned long children = argc > 5 ? strtoul(argv[5], NULL, 0) : 0, number = 0, parent;
	size_t owned = argc > 6 ? strtoul(argv[6], NULL, 0) : 0;
	const char *more = argc > 8 ? argv[8] : "";
	size_t deep = !strcmp(more, "kinds") ? STACK : 0;
	size_t written = !strcmp(more, "parted") ? pages / 2 : pages;
	uint64_t *own = NULL, *stack = alloca(deep * PAGE), *shared = NULL;
	int ready = -1, outside = -1;
	uint64_t *memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE,
				MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint64_t *random = mmap(NULL, PAGE, PROT_READ | PROT_WRITE,
				MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED || random == MAP_FAILED || madvise(random, PAGE, MADV_WIPEONFORK))
		return 1;
	*random = 42;
	volatile const uint32_t *generation = map_generation();
	if (getenv("OUTSIDE") && (outside = reach(getenv("OUTSIDE"))) < 0)
		return 1;
	for (size_t size = !strcmp(more, "full") ? 1UL << 46 : 0; size >= 1UL << 30; size /= 2)
		while (mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) !=
		       MAP_FAILED)
			;
	for (size_t i = 0; i < pages; i++)
		fill(memory + i * PAGE / 8, i % every == 0 ? other : seed, i);
	for (size_t i = 0; i < deep; i++)
		fill(stack + i * PAGE / 8, seed, i);
	if (deep) {
		shared = mmap(NULL, SHARED * 8 * PAGE, PROT_READ | PROT_WRITE,
			      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
		if (shared == MAP_FAILED)
			return 1;
		for (size_t i = 0; i < SHARED; i++)
			fill(shared + i * PAGE / 8, seed, i);
	}
	for (int depth = argc > 7 ? atoi(argv[7]) : 1; depth > 0; depth--) {
		parent = number;
		number = breed(number, children, !strcmp(more, "orphans"), &ready);
		if (number == parent)
			break;
		for (size_t i = 0; i < written; i += 2)
			fill(memory + i * PAGE / 8, seed + number, i);
		if (written < pages && mprotect(memory, written * PAGE, PROT_READ))
			return 1;
		own = mmap(NULL, owned * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
			   -1, 0);
		if (own == MAP_FAILED)
			return 1;
		for (size_t i = 0; i < owned; i++)
			fill(own + i * PAGE / 8, seed + number, i);
		for (size_t i = 0; i < deep; i++)
			fill(stack + i * PAGE / 8, seed + number, i);
	}
	settle(number);
	int listener = socket(AF_UNIX, SOCK_STREAM, 0);
	if (bind(listener, (void *)&place, sizeof(place)) || listen(listener, 16))
		return 1;
	if (number && (limit() || write(ready, "", 1) != 1 || close(ready)))
		return 1;
	if (!number) {
		puts("ready to answer");
		fflush(stdout);
	}
	if (!number && getenv("NOTIFY_SOCKET") && notify(getenv("NOTIFY_SOCKET")))
		return 1;
	for (;;) {
		char words[256];
		int fd = accept(listener, NULL, NULL);
		ssize_t len = read(fd, words, sizeof(words) - 1);
		words[len < 0 ? 0 : len] = 0;
		if (!strncmp(words, "sum", 3)) {
			uint64_t sum = 0;
			for (size_t i = 0; i < pages * PAGE / 8; i++)
				sum = sum * 31 + memory[i];
			for (size_t i = 0; own && i < owned * PAGE / 8; i++)
				sum = sum * 31 + own[i];
			for (size_t i = 0; i < deep * PAGE / 8; i++)
				sum = sum * 31 + stack[i];
			dprintf(fd, "%016llx", (unsigned long long)sum);
		} else if (!strncmp(words, "page ", 5)) {
			dprintf(fd, "%016llx", (unsigned long long)memory[strtoul(words + 5, NULL, 0) * PAGE / 8]);
		} else if (!strncmp(words, "print ", 6)) {
			dprintf(fd, "%d", printf("%s\n", words + 6) < 0 || fflush(stdout));
		} else if (!strncmp(words, "drop ", 5)) {
			// What was given back reads as zeros.
			uint64_t *page = memory + strtoul(words + 5, NULL, 0) * PAGE / 8;
			int failed = madvise(page, PAGE, MADV_DONTNEED);
			dprintf(fd, "%d %llu", failed, (unsigned long long)*page);
		} else if (!strncmp(words, "join", 4)) {
			// Only what is one mapping to the kernel can be moved.
			int failed = mprotect(memory, pages * PAGE, PROT_READ | PROT_WRITE);
			void *moved = mremap(memory, pages * PAGE, (pages + 1) * PAGE, MREMAP_MAYMOVE);

			dprintf(fd, "%s", failed || moved == MAP_FAILED ? strerror(errno) : "joined");
			memory = moved == MAP_FAILED ? memory : moved;
		} else if (!strncmp(words, "away", 4)) {
			// To swap, if there is any.
			dprintf(fd, "%d", madvise(memory, pages * PAGE, MADV_PAGEOUT));
		} else if (!strncmp(words, "own ", 4)) {
			dprintf(fd, "%016llx", (unsigned long long)own[strtoul(words + 4, NULL, 0) * PAGE / 8]);
		} else if (!strncmp(words, "dirty ", 6)) {
			size_t count = strtoul(words + 6, NULL, 0);
			for (size_t i = 0; i < count; i++)
				memory[i * PAGE / 8]++;
			dprintf(fd, "%zu", count);
		} else if (!strncmp(words, "host", 4)) {
			char name[256] = "";
			gethostname(name, sizeof(name) - 1);
			dprintf(fd, "%s", name);
		} else if (!strncmp(words, "shared ", 7)) {
			dprintf(fd, "%016llx", (unsigned long long)shared[strtoul(words + 7, NULL, 0) * PAGE / 8]);
		} else if (!strncmp(words, "share ", 6)) {
			shared[strtoul(words + 6, NULL, 0) * PAGE / 8] = 1;
			dprintf(fd, "1");
		} else if (!strncmp(words, "write ", 6)) {
			own[strtoul(words + 6, NULL, 0) * PAGE / 8] = 1;
			dprintf(fd, "1");
		} else if (!strncmp(words, "free ", 5)) {
			uint64_t *page = own + strtoul(words + 5, NULL, 0) * PAGE / 8;
			int failed = madvise(page, PAGE, MADV_DONTNEED);
			dprintf(fd, "%d %llu", failed, (unsigned long long)*page);
		} else if (!strncmp(words, "entropy", 7)) {
			// Of the kind that a library keeps: filled when it is found empty.
			if (!*random && getentropy(random, sizeof(*random)))
				return 1;
			dprintf(fd, "%016llx", (unsigned long long)*random);
		} else if (!strncmp(words, "outside", 7)) {
			char byte;
			ssize_t came = recv(outside, &byte, 1, MSG_DONTWAIT);
			dprintf(fd, "%s", came == 0 ? "closed" : came > 0 ? "something" : strerror(errno));
		} else if (!strncmp(words, "generation", 10)) {
			dprintf(fd, "%u", generation ? *generation : 0);
		} else if (!strncmp(words, "heard", 5)) {
			dprintf(fd, "%d", heard());
		} else if (!strncmp(words, "time", 4)) {
			tell_time(fd);
		} else if (!strncmp(words, "random", 6)) {
			dprintf(fd, "%llu", (unsigned long long)*random);
		}
		close(fd);
	}
}
