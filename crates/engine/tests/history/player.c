/* A crowd of players, of which each plays a random history of its memory, a step at a time. A line
 * "SEED MOST ADVICES" on standard input is a step: at most so many operations, chosen by the seed,
 * with so many kinds of advice of those in advise(); then the children play theirs, and "." is the
 * answer. Whoever leads the crowd plays nothing. All end with their input. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <malloc.h>
#include <setjmp.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096ul
/* At a fixed place, so that addresses are used again and again. */
#define ARENA ((char *)0x100000000000ul)
/* Three huge pages for one player of eight; the others meet their own traces more often. */
#define LARGE (3 * 512ul)
#define SMALL 96ul
#define CHILDREN 3
#define CROWD 256

static uint64_t state;
static pthread_attr_t small;
static uint64_t grown, advices, pages;
/* Which pages are shared memory, if they are mapped still; pages can be moved behind the arena. */
static char shared[2 * LARGE];
static int file;
static struct child {
	pid_t pid;
	int to, from;
} children[CHILDREN], crowd[CROWD];
static sigjmp_buf fault;

static uint64_t number(uint64_t below)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (state >> 11) % below;
}

static void on_fault(int signal)
{
	(void)signal;
	siglongjmp(fault, 1);
}

static size_t number_of(char *page)
{
	return (size_t)(page - ARENA) / PAGE;
}

/* A range of the arena, mostly a short one. */
static char *range(size_t *len)
{
	uint64_t first = number(pages), left = pages - first;
	uint64_t most = number(8) ? 40 : pages;
	*len = (1 + number(left < most ? left : most)) * PAGE;
	return ARENA + first * PAGE;
}

static void store(char *at, size_t len)
{
	if (sigsetjmp(fault, 1))
		return;
	for (size_t i = 0; i < len; i += number(3) ? PAGE : 64)
		*(volatile uint64_t *)(at + i) = number(8) ? state : 0;
}

static void *thread(void *arg)
{
	size_t len;
	char *at = range(&len);
	(void)arg;
	store(at, len);
	return NULL;
}

static void deepen(uint64_t depth)
{
	volatile char room[3000];
	memset((char *)room, (int)depth, sizeof room);
	if (depth)
		deepen(depth - 1);
	room[1]++;
}

/* Lets the heap grow and shrink. */
static void breathe(void)
{
	uint64_t count = number(20);
	char *top;

	if (number(2) && grown >= count) {
		sbrk(-(intptr_t)(count * PAGE));
		grown -= count;
		return;
	}
	top = sbrk((intptr_t)(count * PAGE));
	if (top == (char *)-1)
		return;
	grown += count;
	store(top, count * PAGE);
}

static void map(void)
{
	static const int kinds[] = { MAP_PRIVATE | MAP_ANONYMOUS, MAP_PRIVATE, MAP_SHARED | MAP_ANONYMOUS,
				     MAP_PRIVATE | MAP_ANONYMOUS };
	int kind = kinds[number(4)], fd = kind & MAP_ANONYMOUS ? -1 : file;
	int prot = number(6) ? PROT_READ | PROT_WRITE : PROT_READ;
	size_t len;
	char *at = range(&len);

	mmap(at, len, prot, kind | MAP_FIXED, fd, fd < 0 ? 0 : (off_t)(number(16) * PAGE));
	memset(shared + number_of(at), (kind & MAP_SHARED) != 0, len / PAGE);
}

/* Moves pages as far as there are any, one by one: how mappings are divided, which is not the
 * same in tasks that were restored, makes no difference. */
static void move_pages(char *from, size_t len, int flags, char *to)
{
	if (from < to + len && to < from + len)
		return;
	munmap(to, len);
	for (size_t at = 0; at < len; at += PAGE)
		mremap(from + at, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED | flags, to + at);
	memcpy(shared + number_of(to), shared + number_of(from), len / PAGE);
}

/* Images do not tell how large shared memory is that is not mapped to its end, or beyond it. */
static void grow(char *last)
{
	uint64_t count = number(20);

	if (!shared[number_of(last)])
		mremap(last, PAGE, PAGE + count * PAGE, 0);
}

static void move(void)
{
	size_t len, other;
	char *from = range(&len), *to = range(&other);

	switch (number(4)) {
	case 0:
		grow(from + len - PAGE);
		return;
	case 1:
		move_pages(from, len, MREMAP_DONTUNMAP, to);
		return;
	case 2:
		munmap(from + PAGE, len - PAGE);
		return;
	default:
		move_pages(from, len < other ? len : other, 0, to);
	}
}

static void advise(void)
{
	/* At the end what children get, and guard pages. */
	static const int kinds[] = { MADV_DONTNEED, MADV_DONTNEED, MADV_HUGEPAGE, MADV_NOHUGEPAGE,
				     MADV_DONTFORK, MADV_DOFORK, MADV_COLD, MADV_PAGEOUT,
				     MADV_POPULATE_READ, MADV_POPULATE_WRITE, 25 /* MADV_COLLAPSE */,
				     MADV_MERGEABLE, MADV_WIPEONFORK, MADV_KEEPONFORK, 102, 103 };
	size_t len;
	char *at = range(&len);

	madvise(at, len, kinds[number(advices)]);
}

static void protect(void)
{
	static const int kinds[] = { PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE, PROT_READ | PROT_WRITE };
	size_t len;
	char *at = range(&len);

	mprotect(at, len, kinds[number(4)]);
}

static void leave(struct child *child)
{
	if (!child->pid)
		return;
	close(child->to);
	close(child->from);
	waitpid(child->pid, NULL, 0);
	child->pid = 0;
}

static void forget(struct child *all, size_t count)
{
	for (size_t i = 0; i < count; i++) {
		if (all[i].pid) {
			close(all[i].to);
			close(all[i].from);
		}
	}
	memset(all, 0, count * sizeof *all);
}

/* Forks a child with pipes of its own. True in the child. */
static int beget(struct child *child)
{
	int to[2], from[2];

	if (pipe2(to, O_CLOEXEC) || pipe2(from, O_CLOEXEC))
		_exit(3);
	child->pid = fork();
	if (child->pid < 0)
		_exit(4);
	if (child->pid == 0) {
		forget(crowd, CROWD);
		forget(children, CHILDREN);
		dup2(to[0], 0);
		dup2(from[1], 1);
		close(to[1]);
		close(from[0]);
		return 1;
	}
	close(to[0]);
	close(from[1]);
	child->to = to[1];
	child->from = from[0];
	return 0;
}

static void play(void);

/* Becomes the same program again, which answers the step and plays on. */
static void become_another(void)
{
	char name[16], size[16];
	for (int i = 0; i < CHILDREN; i++)
		leave(&children[i]);
	snprintf(name, sizeof name, "%d", file);
	snprintf(size, sizeof size, "%lu", pages);
	execl("/proc/self/exe", "player", "again", name, size, (char *)NULL);
	_exit(5);
}

static void operate(int may_become)
{
	size_t len;
	char *at;
	pthread_t other;
	struct child *child;

	switch (number(16)) {
	case 0:
	case 1:
		map();
		return;
	case 2:
		at = range(&len);
		munmap(at, len);
		return;
	case 3:
	case 4:
		move();
		return;
	case 5:
		protect();
		return;
	case 6:
	case 7:
		advise();
		return;
	case 8:
		if (number(3))
			return;
		child = &children[number(CHILDREN)];
		leave(child);
		if (beget(child))
			play();
		return;
	case 9:
		if (may_become && number(4) == 0)
			become_another();
		return;
	case 10:
		breathe();
		deepen(number(60));
		return;
	case 11:
		if (pthread_create(&other, &small, thread, NULL) == 0)
			pthread_join(other, NULL);
		return;
	case 12:
		/* Written by the kernel. */
		at = range(&len);
		if (pread(file, at, len, 0) < 0)
			return;
		return;
	default:
		at = range(&len);
		store(at, len);
	}
}

/* A step that is to be played. */
struct order {
	uint64_t seed, most, advices;
};

static void answer(void)
{
	if (write(1, ".", 1) != 1)
		_exit(0);
}

static void tell(const struct child *child, uint64_t seed, const struct order *order)
{
	char text[80];
	int len = snprintf(text, sizeof text, "%lu %lu %lu\n", seed, order->most, order->advices);

	if (write(child->to, text, (size_t)len) != len)
		_exit(6);
}

static void await(const struct child *child)
{
	char dot;

	if (read(child->from, &dot, 1) != 1)
		_exit(7);
}

static struct order listen(void)
{
	struct order order;
	char line[80];
	size_t at = 0;

	do {
		if (at == sizeof line)
			_exit(8);
		if (read(0, line + at, 1) != 1)
			_exit(0);
	} while (line[at++] != '\n');
	line[at - 1] = 0;
	if (sscanf(line, "%lu %lu %lu", &order.seed, &order.most, &order.advices) != 3)
		_exit(9);
	return order;
}

static void play(void)
{
	for (;;) {
		struct order order = listen();
		uint64_t count;

		state = order.seed | 1;
		advices = order.advices;
		count = 1 + number(order.most);
		for (uint64_t i = 0; i < count; i++)
			operate(i + 1 == count);
		for (uint64_t i = 0; i < CHILDREN; i++) {
			if (children[i].pid) {
				tell(&children[i], order.seed * 31 + i + 7, &order);
				await(&children[i]);
			}
		}
		answer();
	}
}

/* What a player does at a step depends on its own number and on nothing of the others. */
static uint64_t mix(uint64_t player, uint64_t seed)
{
	return ((player + 1) * 0x9e3779b97f4a7c15 ^ seed) * 0xbf58476d1ce4e5b9;
}

static void lead(uint64_t first, uint64_t count)
{
	for (uint64_t i = 0; i < count; i++) {
		if (!beget(&crowd[i]))
			continue;
		pages = (first + i) % 8 ? SMALL : LARGE;
		mmap(ARENA, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
		play();
	}
	for (;;) {
		struct order order = listen();

		for (uint64_t i = 0; i < count; i++)
			tell(&crowd[i], mix(first + i, order.seed), &order);
		for (uint64_t i = 0; i < count; i++)
			await(&crowd[i]);
		answer();
	}
}

/* FILE FIRST COUNT: leads so many players, and the first one's number. */
int main(int argc, char **argv)
{
	struct sigaction action = { .sa_handler = on_fault };
	static char room[1 << 16];
	stack_t stack = { .ss_sp = room, .ss_size = sizeof room };
	uint64_t count;

	if (argc != 4)
		return 2;
	/* The heap is for the history alone. */
	mallopt(M_MMAP_THRESHOLD, 0);
	/* A stack stays when its thread has ended. */
	pthread_attr_init(&small);
	pthread_attr_setstacksize(&small, 1 << 16);
	sigaltstack(&stack, NULL);
	action.sa_flags = SA_ONSTACK;
	sigaction(SIGSEGV, &action, NULL);
	sigaction(SIGBUS, &action, NULL);
	signal(SIGPIPE, SIG_IGN);
	if (strcmp(argv[1], "again") == 0) {
		file = atoi(argv[2]);
		pages = strtoul(argv[3], NULL, 10);
		mmap(ARENA, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
		answer();
		play();
	}
	file = open(argv[1], O_RDONLY);
	count = strtoul(argv[3], NULL, 10);
	if (file < 0 || count > CROWD)
		return 2;
	lead(strtoul(argv[2], NULL, 10), count);
}
