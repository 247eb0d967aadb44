// area: copy-on-write
// shows: pages that a family shares are right in each of it when they are saved once
// dump: --dedup-relatives
// foreign: no CRIU's images do not say which pages are a relative's
#include "zoo.h"

#define PAGE 4096
#define PAGES 64
#define CHILDREN 3

/*
 * Before the fork all pages hold what their number says. Behind it the parent writes those of the
 * first quarter, so that only its children share what was there; each child writes one page of its
 * own, in the second quarter; the third is moved within the first child; the fourth is the same for
 * all of them, but that the second child has no right to it. The last page is of a grandchild.
 */
static const char *const NAMES[] = { "first", "second", "third", "grandchild" };
static char *area, *moved;

static void verify(int who)
{
	for (int i = 0; i < PAGES; i++) {
		char *at = area + i * PAGE;
		uint64_t seed = 1000 + i;

		if (i < PAGES / 4 && who < 0)
			seed = 2000 + i;
		else if (i == PAGES / 4 + who)
			seed = 3000 + who;
		else if (i == PAGES - 1 && who == CHILDREN)
			seed = 4000;
		if (who == 0 && i >= PAGES / 2 && i < PAGES / 4 * 3)
			at = moved + (i - PAGES / 2) * PAGE;
		CHECK(zoo_filled(at, PAGE, seed));
	}
}

static void child(int who)
{
	zoo_fill(area + (PAGES / 4 + who) * PAGE, PAGE, 3000 + who);
	if (who == 0) {
		char *place = zoo_map(PAGES / 4 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1);

		moved = mremap(area + PAGES / 2 * PAGE, PAGES / 4 * PAGE, PAGES / 4 * PAGE,
			       MREMAP_MAYMOVE | MREMAP_FIXED, place);
		CHECK(moved != MAP_FAILED);
	}
	if (who == 1)
		TRY(mprotect(area + PAGES / 4 * 3 * PAGE, PAGES / 4 * PAGE, PROT_NONE));
	zoo_tell(NAMES[who]);
	zoo_wait();
	if (who == 1)
		TRY(mprotect(area + PAGES / 4 * 3 * PAGE, PAGES / 4 * PAGE, PROT_READ));
	verify(who);
	_exit(0);
}

static void grandchild(void)
{
	pid_t pid = TRY(fork());

	if (pid == 0) {
		zoo_fill(area + (PAGES - 1) * PAGE, PAGE, 4000);
		child(CHILDREN);
	}
	CHECK_EXIT(pid, 0);
	_exit(0);
}

int main(void)
{
	pid_t pids[CHILDREN + 1];

	area = zoo_map(PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	for (int i = 0; i < PAGES; i++)
		zoo_fill(area + i * PAGE, PAGE, 1000 + i);
	for (int who = 0; who <= CHILDREN; who++) {
		pids[who] = TRY(fork());
		if (pids[who] == 0 && who == CHILDREN)
			grandchild();
		if (pids[who] == 0)
			child(who);
	}
	for (int i = 0; i < PAGES / 4; i++)
		zoo_fill(area + i * PAGE, PAGE, 2000 + i);
	for (int who = 0; who <= CHILDREN; who++)
		zoo_await(NAMES[who]);
	zoo_ready();
	zoo_wait();
	verify(-1);
	for (int who = 0; who <= CHILDREN; who++)
		CHECK_EXIT(pids[who], 0);
	zoo_pass();
}
