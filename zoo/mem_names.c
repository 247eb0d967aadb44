// area: memory
// shows: names that a program gives to anonymous memory, private and shared
// foreign: no CRIU keeps no names of memory
#include "zoo.h"
#include <sys/mman.h>
#include <sys/prctl.h>

#ifndef PR_SET_VMA
#define PR_SET_VMA 0x53564d41
#define PR_SET_VMA_ANON_NAME 0
#endif

#define PAGE 4096UL

static char *map(size_t size, int flags)
{
	return TRY(mmap(NULL, size, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS, -1, 0));
}

/* What /proc says of the memory that begins there. */
static const char *line_of(const void *start)
{
	char text[32];
	const char *line;

	snprintf(text, sizeof text, "%lx-", (unsigned long)start);
	line = strstr(zoo_slurp("/proc/self/maps"), text);
	CHECK(line != NULL);
	return line;
}

static int is_named(const void *start, const char *name)
{
	const char *line = line_of(start), *end = strchr(line, '\n'), *found = strstr(line, name);

	return found && found <= end;
}

static void check(char *own, char *shared)
{
	CHECK(is_named(own, "[anon:a heap: (1)]\n"));
	CHECK(!is_named(own + 2 * PAGE, "[anon"));
	CHECK(is_named(shared, "[anon_shmem:queue]\n"));
	CHECK(own[0] == 'a' && own[2 * PAGE] == 'b' && shared[0] == 'c');
}

int main(void)
{
	char *own = map(4 * PAGE, MAP_PRIVATE), *shared = map(PAGE, MAP_SHARED);

	if (prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, own, 2 * PAGE, "a heap: (1)"))
		zoo_skip("no names of memory");
	TRY(prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, shared, PAGE, "queue"));
	own[0] = 'a';
	own[2 * PAGE] = 'b';
	shared[0] = 'c';
	check(own, shared);
	zoo_ready();
	zoo_wait();
	check(own, shared);
	zoo_pass();
}
