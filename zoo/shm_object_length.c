// area: shared memory
// shows: shared anonymous memory that is longer, or shorter, than what is mapped of it
// foreign: yes
#include "zoo.h"

#include <setjmp.h>

#define PAGE 4096ul

static sigjmp_buf fault;

static void on_fault(int sig)
{
	siglongjmp(fault, sig);
}

static char *map(unsigned long pages)
{
	return zoo_map(pages * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1);
}

static char *resize(char *area, unsigned long from, unsigned long to)
{
	char *place = mremap(area, from * PAGE, to * PAGE, MREMAP_MAYMOVE);

	CHECK(place != MAP_FAILED);
	return place;
}

/* Whether a page lies within its object. */
static int is_there(volatile char *page)
{
	if (sigsetjmp(fault, 1))
		return 0;
	page[0]++;
	return 1;
}

int main(void)
{
	struct sigaction sa = { .sa_handler = on_fault };
	char *empty = map(8), *full = map(8), *shorter = map(2);

	TRY(sigaction(SIGBUS, &sa, NULL));
	/* Six pages that were never written, and six that were, are mapped nowhere any more. */
	zoo_fill(full, 8 * PAGE, 7);
	empty = resize(empty, 8, 2);
	full = resize(full, 8, 2);
	/* The mapping grows, its object does not. */
	shorter = resize(shorter, 2, 4);
	zoo_fill(shorter, 2 * PAGE, 8);
	CHECK(!is_there(shorter + 2 * PAGE));
	zoo_ready();
	zoo_wait();
	CHECK(zoo_filled(shorter, 2 * PAGE, 8));
	CHECK(!is_there(shorter + 2 * PAGE));
	full = resize(full, 2, 8);
	CHECK(zoo_filled(full, 8 * PAGE, 7));
	empty = resize(empty, 2, 8);
	CHECK(is_there(empty + 7 * PAGE));
	zoo_pass();
}
