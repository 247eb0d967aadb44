// area: memory
// shows: advice: DONTFORK, DONTDUMP, SEQUENTIAL, RANDOM, HUGEPAGE, NOHUGEPAGE, MERGEABLE, WIPEONFORK,
//   locked and NORESERVE areas
// foreign: yes
#include "zoo.h"

#define SIZE (4 << 20)

static bool has_flag(void *area, const char *flag)
{
	char want[32], line[512];
	bool here = false;
	FILE *f = fopen("/proc/self/smaps", "re");

	CHECK(f);
	snprintf(want, sizeof want, "%lx-", (unsigned long)area);
	while (fgets(line, sizeof line, f)) {
		if (!strncmp(line, want, strlen(want)))
			here = true;
		if (here && !strncmp(line, "VmFlags:", 8)) {
			fclose(f);
			return strstr(line, flag);
		}
	}
	zoo_fail("no area at %p", area);
}

int main(void)
{
	static const struct {
		int advice;
		const char *flag;
	} cases[] = {
		{ MADV_DONTFORK, " dc" }, { MADV_DONTDUMP, " dd" },   { MADV_SEQUENTIAL, " sr" },
		{ MADV_RANDOM, " rr" },	  { MADV_HUGEPAGE, " hg" },   { MADV_NOHUGEPAGE, " nh" },
		{ MADV_MERGEABLE, " mg" }, { MADV_WIPEONFORK, " wf" },
	};
	enum { N = sizeof cases / sizeof *cases };
	char *areas[N], *locked, *onfault, *noreserve;
	bool have[N];

	for (int i = 0; i < N; i++) {
		/* A gap between the areas, so that none is merged. */
		areas[i] = zoo_map(SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
		TRY(munmap(areas[i] + SIZE / 2, SIZE / 2));
		TRY(mprotect(areas[i], SIZE / 2, PROT_READ | PROT_WRITE));
		have[i] = madvise(areas[i], SIZE / 2, cases[i].advice) == 0;
		zoo_fill(areas[i], SIZE / 2, i);
	}
	locked = zoo_map(1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	TRY(mlock(locked, 1 << 20));
	onfault = zoo_map(1 << 20, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	TRY(mlock2(onfault, 1 << 20, MLOCK_ONFAULT));
	noreserve = zoo_map(1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < N; i++) {
		CHECK(zoo_filled(areas[i], SIZE / 2, i));
		if (have[i] && !has_flag(areas[i], cases[i].flag))
			zoo_fail("the area has lost the flag%s", cases[i].flag);
	}
	CHECK(has_flag(locked, " lo"));
	CHECK(has_flag(onfault, " lo"));
	CHECK(has_flag(noreserve, " nr"));
	zoo_pass();
}
