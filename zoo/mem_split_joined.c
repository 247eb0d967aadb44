// area: memory
// shows: mappings that differed in their protection when they were dumped are one again, and move as one
// modes: plain leave-running cow rounds compressed pidns ns userns sealed
// foreign: no CRIU's images do not say which mappings are one
#include "zoo.h"

#define SIZE (1 << 20)

/* Memory that was written, whose first half cannot be for a while. */
static char *split(char *area)
{
	TRY(mprotect(area, SIZE / 2, PROT_READ));
	return area;
}

static char *written(int seed)
{
	char *area = zoo_map(SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);

	zoo_fill(area, SIZE, seed);
	return area;
}

/* mremap(2) takes what is one mapping to the kernel, no more. */
static char *grown(char *area, const char *name)
{
	TRY(mprotect(area, SIZE, PROT_READ | PROT_WRITE));
	area = mremap(area, SIZE, 2 * SIZE, MREMAP_MAYMOVE);
	if (area == MAP_FAILED)
		zoo_fail("%s: mremap: %m", name);
	CHECK(area[SIZE] == 0);
	return area;
}

int main(void)
{
	char *plain = split(written(1)), *touched = split(written(2)), *halved = split(written(3));
	char *inherited = written(4), *third = written(3);
	pid_t child;

	TRY(madvise(halved, SIZE / 2, MADV_DONTNEED));
	child = TRY(fork());
	if (child == 0) {
		split(inherited);
		zoo_tell("split");
		zoo_wait();
		CHECK(zoo_filled(grown(inherited, "inherited"), SIZE, 4));
		_exit(0);
	}
	zoo_await("split");
	zoo_ready();
	zoo_wait();
	CHECK(zoo_filled(grown(plain, "plain"), SIZE, 1));
	touched[SIZE - 1] = touched[SIZE - 1];
	CHECK(zoo_filled(grown(touched, "touched"), SIZE, 2));
	halved = grown(halved, "halved");
	CHECK(halved[0] == 0 && halved[SIZE / 2 - 1] == 0);
	CHECK(memcmp(halved + SIZE / 2, third + SIZE / 2, SIZE / 2) == 0);
	CHECK(zoo_filled(grown(inherited, "the parent's"), SIZE, 4));
	CHECK_EXIT(child, 0);
	zoo_pass();
}
