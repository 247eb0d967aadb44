// area: memory
// shows: all protections of private and shared, anonymous and file mappings, with content and access
// foreign: yes
#include "zoo.h"
#include <setjmp.h>

#define PAGE 4096
#define KINDS 4

static sigjmp_buf fault;

static void on_segv(int sig)
{
	siglongjmp(fault, sig);
}

static bool can_read(volatile char *p)
{
	if (sigsetjmp(fault, 1))
		return false;
	(void)*p;
	return true;
}

static bool can_write(volatile char *p)
{
	if (sigsetjmp(fault, 1))
		return false;
	*p = *p;
	return true;
}

int main(void)
{
	int prots[] = { PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE, PROT_READ | PROT_WRITE | PROT_EXEC };
	int flags[] = { MAP_PRIVATE | MAP_ANONYMOUS, MAP_SHARED | MAP_ANONYMOUS, MAP_PRIVATE, MAP_SHARED };
	char *areas[KINDS][4];
	struct sigaction sa = { .sa_handler = on_segv };

	for (int k = 0; k < KINDS; k++)
		for (int p = 0; p < 4; p++) {
			int fd = -1;

			if (!(flags[k] & MAP_ANONYMOUS)) {
				char name[16];

				snprintf(name, sizeof name, "file%d%d", k, p);
				fd = TRY(open(name, O_RDWR | O_CREAT, 0600));
				TRY(ftruncate(fd, 2 * PAGE));
			}
			areas[k][p] = zoo_map(2 * PAGE, PROT_READ | PROT_WRITE, flags[k], fd);
			zoo_fill(areas[k][p], 2 * PAGE, k * 4 + p);
			TRY(mprotect(areas[k][p], 2 * PAGE, prots[p]));
			close(fd);
		}
	TRY(sigaction(SIGSEGV, &sa, NULL));
	zoo_ready();
	zoo_wait();
	for (int k = 0; k < KINDS; k++)
		for (int p = 0; p < 4; p++) {
			CHECK_EQ(can_read(areas[k][p]), !!(prots[p] & PROT_READ));
			CHECK_EQ(can_write(areas[k][p]), !!(prots[p] & PROT_WRITE));
			TRY(mprotect(areas[k][p], 2 * PAGE, PROT_READ | PROT_WRITE));
			CHECK(zoo_filled(areas[k][p], 2 * PAGE, k * 4 + p));
		}
	zoo_pass();
}
