// area: memory
// shows: threads that wait for pages of a userfaultfd: one whose fault nobody has read, one whose fault was read
// varies: fd
// foreign: no CRIU keeps no userfaultfd
#include "userfaultfd.h"

/* Whether fdinfo counts as many faults. */
static bool counts(int fd, int pending, int total)
{
	char path[64], want[64];

	snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd);
	snprintf(want, sizeof want, "pending:\t%d\ntotal:\t%d\n", pending, total);
	return strstr(zoo_slurp(path), want) != NULL;
}

int main(void)
{
	char *area = zoo_map(2 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	int fd = uffd_open(O_CLOEXEC, 0);
	pthread_t first, second;
	struct uffd_msg msg;
	unsigned long seen;

	uffd_register(fd, area, 2 * 4096, UFFDIO_REGISTER_MODE_MISSING);
	first = uffd_start(uffd_reader, area);
	uffd_expect(fd, area);
	second = uffd_start(uffd_writer, area + 4096);
	WAIT_UNTIL(counts(fd, 1, 2));
	zoo_ready();
	zoo_wait();
	/* The first may be told of again, or not: without a checkpoint it is not. */
	uffd_fill(fd, area, 'f');
	do {
		CHECK_EQ(read(fd, &msg, sizeof msg), sizeof msg);
		CHECK_EQ(msg.event, UFFD_EVENT_PAGEFAULT);
		seen = msg.arg.pagefault.address & ~4095ul;
		uffd_fill(fd, (void *)seen, 'x');
	} while (seen == (uintptr_t)area);
	CHECK_EQ(seen, (uintptr_t)area + 4096);
	CHECK_EQ(uffd_join(first), 'f');
	uffd_join(second);
	CHECK_EQ(area[4096], 'w');
	zoo_pass();
}
