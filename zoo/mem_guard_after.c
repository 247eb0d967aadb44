// area: memory
// shows: guard pages put over memory that has not come yet stay, and what they covered is gone
// modes: lazy
// restore: --record-working-set=4
// varies: maps
#include "zoo.h"
#include <setjmp.h>

#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#define MADV_GUARD_REMOVE 103
#endif
#define PAGE 4096
#define PAGES 256

static sigjmp_buf fault;

static void on_segv(int sig)
{
	siglongjmp(fault, sig);
}

static bool guarded(volatile char *p)
{
	if (sigsetjmp(fault, 1))
		return true;
	(void)*p;
	return false;
}

/* Whether some of the memory is still to be brought in. */
static bool comes(void)
{
	return strstr(zoo_slurp("/proc/self/smaps"), " um") != NULL;
}

int main(void)
{
	struct sigaction sa = { .sa_handler = on_segv };
	char *memory = zoo_map(PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);

	for (int i = 0; i < PAGES; i++)
		zoo_fill(memory + i * PAGE, PAGE, i);
	TRY(sigaction(SIGSEGV, &sa, NULL));
	zoo_ready();
	zoo_wait();
	/* What is not touched is not there: the working set is being recorded. */
	for (int i = 0; i < PAGES; i += 7)
		if (madvise(memory + i * PAGE, i % 2 ? PAGE : 2 * PAGE, MADV_GUARD_INSTALL))
			zoo_skip("no guard pages");
	WAIT_UNTIL(!comes());
	for (int i = 0; i < PAGES; i++) {
		bool covered = i % 7 == 0 || i % 14 == 1;

		CHECK_EQ(guarded(memory + i * PAGE), covered);
		if (!covered)
			CHECK(zoo_filled(memory + i * PAGE, PAGE, i));
	}
	TRY(madvise(memory, 2 * PAGE, MADV_GUARD_REMOVE));
	CHECK(memory[0] == 0 && memory[PAGE] == 0);
	zoo_pass();
}
