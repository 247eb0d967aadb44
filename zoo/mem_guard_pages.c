// area: memory
// shows: lightweight guard pages still fault, their neighbours keep their data
// foreign: yes
#include "zoo.h"
#include <setjmp.h>

#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#define MADV_GUARD_REMOVE 103
#endif
#define PAGE 4096
#define PAGES 64

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
	char *anon = zoo_map(PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	int fd = TRY(open("file", O_RDWR | O_CREAT, 0600));
	char *areas[2] = { anon };

	TRY(ftruncate(fd, PAGES * PAGE));
	areas[1] = zoo_map(PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd);
	for (int a = 0; a < 2; a++) {
		for (int i = 0; i < PAGES; i++)
			zoo_fill(areas[a] + i * PAGE, PAGE, a * 100 + i);
		for (int i = 1; i < PAGES; i += 5)
			if (madvise(areas[a] + i * PAGE, PAGE, MADV_GUARD_INSTALL))
				zoo_skip("no guard pages");
	}
	TRY(sigaction(SIGSEGV, &sa, NULL));
	zoo_ready();
	zoo_wait();
	for (int a = 0; a < 2; a++)
		for (int i = 0; i < PAGES; i++) {
			CHECK_EQ(guarded(areas[a] + i * PAGE), i % 5 == 1);
			if (i % 5 != 1)
				CHECK(zoo_filled(areas[a] + i * PAGE, PAGE, a * 100 + i));
		}
	TRY(madvise(anon + PAGE, PAGE, MADV_GUARD_REMOVE));
	CHECK(!guarded(anon + PAGE) && anon[PAGE] == 0);
	zoo_pass();
}
