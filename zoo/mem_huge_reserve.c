// area: memory
// shows: 20 TB of reserved memory with some pages touched, as a sanitizer's shadow, cost nothing
// foreign: yes
#include "zoo.h"

#define TB (1ul << 40)

int main(void)
{
	char *none = zoo_map(10 * TB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
	char *shadow = zoo_map(10 * TB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
	size_t places[] = { 0, 12345 * 4096, TB + 4096, 5 * TB, 9 * TB + 777 * 4096, 10 * TB - 4096 };

	TRY(madvise(shadow, 10 * TB, MADV_DONTDUMP));
	TRY(madvise(shadow, 10 * TB, MADV_NOHUGEPAGE));
	TRY(mprotect(none + TB, 4096, PROT_READ | PROT_WRITE));
	none[TB] = 42;
	for (unsigned i = 0; i < sizeof places / sizeof *places; i++)
		zoo_fill(shadow + places[i], 4096, i);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(none[TB], 42);
	for (unsigned i = 0; i < sizeof places / sizeof *places; i++)
		CHECK(zoo_filled(shadow + places[i], 4096, i));
	CHECK_EQ(shadow[3 * TB], 0);
	zoo_pass();
}
