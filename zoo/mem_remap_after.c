// area: memory
// shows: fork, MADV_DONTNEED and moved mappings after the restore give the right data and zeroes
// foreign: yes
#include "zoo.h"

#define SIZE (1 << 20)

int main(void)
{
	char *a = zoo_map(SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	char *b = zoo_map(SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	char *c = zoo_map(SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1), *grown;
	pid_t child;

	zoo_fill(a, SIZE, 1);
	zoo_fill(b, SIZE, 2);
	zoo_ready();
	zoo_wait();
	child = TRY(fork());
	if (child == 0)
		_exit(!(zoo_filled(a, SIZE, 1) && zoo_filled(b, SIZE, 2)));
	CHECK_EXIT(child, 0);
	CHECK(mremap(a, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, c) == c);
	CHECK(mremap(b, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, a) == a);
	CHECK(zoo_filled(c, SIZE, 1) && zoo_filled(a, SIZE, 2));
	grown = mremap(c, SIZE, 4 * SIZE, MREMAP_MAYMOVE);
	CHECK(grown != MAP_FAILED && zoo_filled(grown, SIZE, 1) && grown[3 * SIZE] == 0);
	TRY(madvise(a, SIZE, MADV_DONTNEED));
	for (int i = 0; i < SIZE; i++)
		CHECK(a[i] == 0);
	zoo_pass();
}
