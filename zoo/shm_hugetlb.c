// area: shared memory
// shows: huge pages: private and shared anonymous mappings and a memfd, in parent and child
// foreign: yes
// needs: hugepages
#include "zoo.h"

#define HUGE (2ul << 20)

int main(void)
{
	int flags = MAP_ANONYMOUS | MAP_HUGETLB, prot = PROT_READ | PROT_WRITE;
	char *private = mmap(NULL, 2 * HUGE, prot, MAP_PRIVATE | flags, -1, 0), *shared, *file;
	int fd;
	pid_t child;

	if (private == MAP_FAILED)
		zoo_skip("no huge pages");
	shared = mmap(NULL, HUGE, prot, MAP_SHARED | flags, -1, 0);
	fd = memfd_create("huge", MFD_HUGETLB);
	if (shared == MAP_FAILED || fd < 0 || ftruncate(fd, HUGE))
		zoo_skip("no huge pages");
	file = zoo_map(HUGE, prot, MAP_SHARED, fd);
	zoo_fill(private, HUGE, 1);
	zoo_fill(shared, HUGE, 2);
	zoo_fill(file, HUGE, 3);
	child = TRY(fork());
	if (child == 0) {
		zoo_fill(private, HUGE, 4);
		zoo_tell("child");
		zoo_wait();
		CHECK(zoo_filled(private, HUGE, 4));
		CHECK(zoo_filled(shared, HUGE, 2));
		CHECK(zoo_filled(file, HUGE, 3));
		zoo_fill(shared, HUGE, 5);
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 0);
	CHECK(zoo_filled(private, HUGE, 1));
	CHECK(zoo_filled(shared, HUGE, 5));
	CHECK(zoo_filled(file, HUGE, 3));
	private[HUGE] = 1;
	zoo_pass();
}
