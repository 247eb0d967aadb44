// area: copy-on-write
// shows: relatives share pages of a mapping that has grown in the parent since, and that the child has parted
// foreign: yes
// modes: -lazy
#include "frame.h"

#define PAGES 64
#define GROWN 16
#define PARTED 40

static char *map(char *at, int pages)
{
	int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;

	TRY(mmap(at, pages * PAGE, PROT_READ | PROT_WRITE, flags, -1, 0));
	TRY(madvise(at, pages * PAGE, MADV_NOHUGEPAGE));
	return at;
}

static bool is_one_mapping(char *at, int pages)
{
	char line[512], wanted[64];
	FILE *maps = fopen("/proc/self/maps", "re");
	bool found = false;

	CHECK(maps);
	snprintf(wanted, sizeof wanted, "%lx-%lx ", (long)at, (long)at + pages * PAGE);
	while (!found && fgets(line, sizeof line, maps))
		found = strncmp(line, wanted, strlen(wanted)) == 0;
	fclose(maps);
	return found;
}

int main(void)
{
	/* With a gap on both sides. */
	char *room = zoo_map((GROWN + PAGES + 2) * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	char *area = map(room + (1 + GROWN) * PAGE, PAGES);
	uint64_t *shared = zoo_map(PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1);
	pid_t child;

	zoo_fill(area, PAGES * PAGE, 1);
	child = TRY(fork());
	if (child == 0) {
		TRY(mprotect(area + PARTED * PAGE, PAGE, PROT_READ));
		zoo_tell("child");
		zoo_wait();
		CHECK(is_one_mapping(area, PARTED));
		for (int i = 0; i < PAGES; i++)
			shared[i] = frame(area + i * PAGE);
		CHECK(zoo_filled(area, PAGES * PAGE, 1));
		zoo_tell("frames");
		zoo_await("compared");
		_exit(0);
	}
	zoo_await("child");
	map(area - GROWN * PAGE, GROWN);
	zoo_fill(area - GROWN * PAGE, GROWN * PAGE, 2);
	CHECK(is_one_mapping(area - GROWN * PAGE, GROWN + PAGES));
	if (frame(area) == 0)
		zoo_skip("page frames are not shown");
	zoo_ready();
	zoo_wait();
	zoo_await("frames");
	CHECK(is_one_mapping(area - GROWN * PAGE, GROWN + PAGES));
	CHECK(zoo_filled(area, PAGES * PAGE, 1));
	CHECK(zoo_filled(area - GROWN * PAGE, GROWN * PAGE, 2));
	for (int i = 0; i < PAGES; i++)
		CHECK_EQ(frame(area + i * PAGE), shared[i]);
	zoo_tell("compared");
	CHECK_EXIT(child, 0);
	zoo_pass();
}
