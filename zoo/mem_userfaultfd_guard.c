// area: memory
// shows: guard pages in memory that a userfaultfd is registered for, which still fault while its missing pages are told of
// foreign: no CRIU keeps no userfaultfd
#include "userfaultfd.h"
#include <setjmp.h>

#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#endif
#define PAGES 16
#define AT(page) (area + (page) * 4096l)

static sigjmp_buf fault;

static void on_segv(int sig)
{
	siglongjmp(fault, sig);
}

static bool guarded(volatile char *p)
{
	if (sigsetjmp(fault, 1))
		return true;
	(void)*p;
	return false;
}

int main(void)
{
	struct sigaction sa = { .sa_handler = on_segv };
	char *area = zoo_map(PAGES * 4096l, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	int missing = uffd_open(O_CLOEXEC, 0);
	pthread_t thread;

	for (int page = 2; page < PAGES; page += 4)
		if (madvise(AT(page), 8192, MADV_GUARD_INSTALL))
			zoo_skip("no guard pages");
	TRY(sigaction(SIGSEGV, &sa, NULL));
	uffd_register(missing, area, PAGES * 4096l, UFFDIO_REGISTER_MODE_MISSING);
	uffd_fill(missing, AT(0), 'a');
	zoo_ready();
	zoo_wait();
	CHECK_EQ(*AT(0), 'a');
	for (int page = 2; page < PAGES; page += 4)
		CHECK(guarded(AT(page)) && guarded(AT(page + 1)));
	for (int page = 4; page < PAGES; page += 4) {
		thread = uffd_start(uffd_reader, AT(page));
		CHECK_EQ(uffd_expect(missing, AT(page)), 0);
		uffd_fill(missing, AT(page), 'c');
		CHECK_EQ(uffd_join(thread), 'c');
	}
	zoo_pass();
}
