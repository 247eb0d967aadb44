/* Plays a random history of its memory, a step at a time. A line "SEED COUNT ADVICE" on standard
 * input is a step: so many operations, chosen by the seed, with so many kinds of advice of
 * those in advise(); then the children play theirs, and "." is the answer. Ends with its input. */
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
/* Three huge pages at a fixed place, so that addresses are used again and again. */
#define ARENA ((char *)0x100000000000ul)
#define PAGES (3 * 512ul)
#define CHILDREN 3

static uint64_t state;
static uint64_t grown, advices;
static int file;
static struct child {
	pid_t pid;
	int to, from;
} children[CHILDREN];
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

/* A range of the arena, mostly a short one. */
static char *range(size_t *len)
{
	uint64_t first = number(PAGES), left = PAGES - first;
	uint64_t most = number(8) ? 40 : PAGES;
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
	uint64_t pages = number(20);
	char *top;

	if (number(2) && grown >= pages) {
		sbrk(-(intptr_t)(pages * PAGE));
		grown -= pages;
		return;
	}
	top = sbrk((intptr_t)(pages * PAGE));
	if (top == (char *)-1)
		return;
	grown += pages;
	store(top, pages * PAGE);
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
}

static void move(void)
{
	size_t len, other;
	char *from = range(&len), *to = range(&other);

	switch (number(4)) {
	case 0:
		from += len - PAGE;
		mremap(from, PAGE, PAGE + number(20) * PAGE, 0);
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
	/* The last ones install and remove guard pages. */
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
	close(child->to);
	close(child->from);
	waitpid(child->pid, NULL, 0);
	child->pid = 0;
}

static void play(void);

static void beget(void)
{
	struct child *child = &children[number(CHILDREN)];
	int to[2], from[2];

	if (child->pid)
		leave(child);
	if (pipe2(to, O_CLOEXEC) || pipe2(from, O_CLOEXEC))
		_exit(3);
	child->pid = fork();
	if (child->pid < 0)
		_exit(4);
	if (child->pid == 0) {
		for (int i = 0; i < CHILDREN; i++) {
			if (children[i].pid) {
				close(children[i].to);
				close(children[i].from);
			}
		}
		memset(children, 0, sizeof children);
		dup2(to[0], 0);
		dup2(from[1], 1);
		close(to[1]);
		close(from[0]);
		play();
	}
	close(to[0]);
	close(from[1]);
	child->to = to[1];
	child->from = from[0];
}

/* Becomes the same program again, which answers the step and plays on. */
static void become_another(void)
{
	char name[16];
	for (int i = 0; i < CHILDREN; i++) {
		if (children[i].pid)
			leave(&children[i]);
	}
	snprintf(name, sizeof name, "%d", file);
	execl("/proc/self/exe", "player", name, "again", (char *)NULL);
	_exit(5);
}

static void operate(int may_become)
{
	size_t len;
	char *at;
	pthread_t other;

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
		if (number(3) == 0)
			beget();
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
		if (pthread_create(&other, NULL, thread, NULL) == 0)
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

static void answer(void)
{
	if (write(1, ".", 1) != 1)
		_exit(0);
}

static void step(uint64_t seed, uint64_t count, uint64_t advice)
{
	char text[64], dot;

	state = seed | 1;
	advices = advice;
	for (uint64_t i = 0; i < count; i++)
		operate(i + 1 == count);
	for (int i = 0; i < CHILDREN; i++) {
		struct child *child = &children[i];
		int len = snprintf(text, sizeof text, "%lu %lu %lu\n", seed * 31 + (uint64_t)i + 7, count, advice);
		if (!child->pid)
			continue;
		if (write(child->to, text, (size_t)len) != len || read(child->from, &dot, 1) != 1)
			_exit(6);
	}
	answer();
}

static void play(void)
{
	char line[64];
	size_t at = 0;

	for (;;) {
		uint64_t seed, count, advice;
		if (read(0, line + at, 1) != 1)
			_exit(0);
		if (line[at] != '\n') {
			if (++at == sizeof line)
				_exit(7);
			continue;
		}
		line[at] = 0;
		at = 0;
		if (sscanf(line, "%lu %lu %lu", &seed, &count, &advice) != 3)
			_exit(8);
		step(seed, count, advice);
	}
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_handler = on_fault };
	static char room[1 << 16];
	stack_t stack = { .ss_sp = room, .ss_size = sizeof room };

	if (argc < 2)
		return 2;
	/* The heap is for the history alone. */
	mallopt(M_MMAP_THRESHOLD, 0);
	sigaltstack(&stack, NULL);
	action.sa_flags = SA_ONSTACK;
	sigaction(SIGSEGV, &action, NULL);
	sigaction(SIGBUS, &action, NULL);
	signal(SIGPIPE, SIG_IGN);
	file = argc > 2 ? atoi(argv[1]) : open(argv[1], O_RDONLY);
	if (file < 0)
		return 2;
	mmap(ARENA, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	if (argc > 2)
		answer();
	play();
}
