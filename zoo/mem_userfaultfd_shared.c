// area: memory
// shows: a userfaultfd on shared memory of a memfd: missing pages, write-protected ones, and minor faults
// foreign: no CRIU keeps no userfaultfd
#include "userfaultfd.h"
#include <sys/mman.h>

int main(void)
{
	int memfd = TRY(memfd_create("pages", 0));
	int fd = uffd_open(O_CLOEXEC | O_NONBLOCK, UFFD_FEATURE_PAGEFAULT_FLAG_WP | UFFD_FEATURE_WP_HUGETLBFS_SHMEM |
							   UFFD_FEATURE_MISSING_SHMEM | UFFD_FEATURE_MINOR_SHMEM);
	struct uffdio_continue next;
	char *area, *minor;
	pthread_t thread;

	TRY(ftruncate(memfd, 16 * 4096));
	CHECK_EQ(pwrite(memfd, "0", 1, 0), 1);
	CHECK_EQ(pwrite(memfd, "1", 1, 4096), 1);
	CHECK_EQ(pwrite(memfd, "8", 1, 8 * 4096), 1);
	area = zoo_map(8 * 4096, PROT_READ | PROT_WRITE, MAP_SHARED, memfd);
	minor = mmap(NULL, 8 * 4096, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 8 * 4096);
	CHECK(minor != MAP_FAILED);
	uffd_register(fd, area, 8 * 4096, UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP);
	uffd_register(fd, minor, 8 * 4096, UFFDIO_REGISTER_MODE_MINOR);
	CHECK_EQ(area[0], '0');
	uffd_protect(fd, area, 8192, true);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(area[0], '0');
	CHECK_EQ(area[4096], '1');
	for (int page = 0; page < 2; page++) {
		thread = uffd_start(uffd_writer, area + page * 4096);
		CHECK(uffd_expect(fd, area + page * 4096) & UFFD_PAGEFAULT_FLAG_WP);
		uffd_protect(fd, area + page * 4096, 4096, false);
		uffd_join(thread);
		CHECK_EQ(area[page * 4096], 'w');
	}
	thread = uffd_start(uffd_reader, area + 5 * 4096);
	CHECK_EQ(uffd_expect(fd, area + 5 * 4096), 0);
	uffd_fill(fd, area + 5 * 4096, '5');
	CHECK_EQ(uffd_join(thread), '5');
	thread = uffd_start(uffd_reader, minor);
	CHECK(uffd_expect(fd, minor) & UFFD_PAGEFAULT_FLAG_MINOR);
	next = (struct uffdio_continue){ { (uintptr_t)minor, 4096 }, 0, 0 };
	TRY(ioctl(fd, UFFDIO_CONTINUE, &next));
	CHECK_EQ(uffd_join(thread), '8');
	zoo_pass();
}
