// area: memory
// shows: userfaultfds with their features: pages that are missing, zero, poisoned, write-protected, and protected holes; faults of the program only
// foreign: no CRIU keeps no userfaultfd
#include "userfaultfd.h"

#define PAGES 1024
#define AT(page) (area + (page) * 4096l)

int main(void)
{
	char *area = zoo_map(PAGES * 4096l, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	char *other = zoo_map(64 * 4096l, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	int missing = uffd_open(O_CLOEXEC, 0);
	int wp = uffd_open(O_CLOEXEC | O_NONBLOCK, UFFD_FEATURE_PAGEFAULT_FLAG_WP | UFFD_FEATURE_WP_UNPOPULATED);
	int own = uffd_open(O_CLOEXEC | FAULTS_OF_PROGRAM, 0);
	char *third = zoo_map(4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	unsigned long long poison[4] = { (uintptr_t)AT(PAGES - 1), 4096 };
	int ends[2], poisoned;
	pthread_t thread;

	TRY(pipe(ends));
	uffd_register(own, third, 4096, UFFDIO_REGISTER_MODE_MISSING);
	/* Around these few pages the kernel could make huge ones. */
	uffd_register(missing, area, PAGES * 4096l, UFFDIO_REGISTER_MODE_MISSING);
	uffd_fill(missing, AT(0), 'a');
	uffd_fill(missing, AT(600), 'b');
	uffd_zero(missing, AT(1), 8192);
	poisoned = ioctl(missing, POISON, poison) == 0;
	for (int i = 0; i < 32; i++)
		other[i * 4096l] = 'o';
	uffd_register(wp, other, 64 * 4096l, UFFDIO_REGISTER_MODE_WP);
	uffd_protect(wp, other + 8 * 4096l, 4096, true);
	uffd_protect(wp, other + 40 * 4096l, 4096, true);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(*AT(0), 'a');
	CHECK_EQ(*AT(600), 'b');
	/* If these were missing this would never end. */
	CHECK_EQ(*AT(1), 0);
	CHECK_EQ(*AT(2), 0);
	if (poisoned) {
		CHECK_EQ(write(ends[1], AT(PAGES - 1), 1), -1);
		CHECK_EQ(errno, EFAULT);
	}
	/* The kernel does not wait for this one. */
	CHECK_EQ(write(ends[1], third, 1), -1);
	CHECK_EQ(errno, EFAULT);
	thread = uffd_start(uffd_reader, third);
	uffd_expect(own, third);
	uffd_fill(own, third, 'd');
	CHECK_EQ(uffd_join(thread), 'd');
	for (int page = 3; page < PAGES; page += 200) {
		thread = uffd_start(uffd_reader, AT(page));
		CHECK_EQ(uffd_expect(missing, AT(page)), 0);
		uffd_fill(missing, AT(page), 'c');
		CHECK_EQ(uffd_join(thread), 'c');
	}
	for (int i = 0; i < 32; i++) {
		CHECK_EQ(other[i * 4096l], 'o');
		if (i != 8)
			other[i * 4096l] = 'p';
	}
	for (int page = 8; page <= 40; page += 32) {
		thread = uffd_start(uffd_writer, other + page * 4096l);
		CHECK_EQ(uffd_expect(wp, other + page * 4096l), UFFD_PAGEFAULT_FLAG_WP | UFFD_PAGEFAULT_FLAG_WRITE);
		uffd_protect(wp, other + page * 4096l, 4096, false);
		uffd_join(thread);
		CHECK_EQ(other[page * 4096l], 'w');
	}
	CHECK_EQ(other[41 * 4096l], 0);
	CHECK(uffd_flagged(area, " um") && !uffd_flagged(area, " uw"));
	CHECK(uffd_flagged(other, " uw") && !uffd_flagged(other, " um"));
	/* What goes with one stays with the other. */
	TRY(close(missing));
	CHECK(!uffd_flagged(area, " um"));
	CHECK(uffd_flagged(other, " uw"));
	CHECK_EQ(*AT(500), 0);
	zoo_pass();
}
