// area: memory
// shows: a file mapping longer than its file: what lies past the end still gives SIGBUS
// foreign: yes
#include "zoo.h"
#include <setjmp.h>

static sigjmp_buf fault;

static void on_bus(int sig)
{
	siglongjmp(fault, sig);
}

int main(void)
{
	int fd = TRY(open("file", O_RDWR | O_CREAT, 0600));
	struct sigaction sa = { .sa_handler = on_bus };
	volatile char *area;

	TRY(ftruncate(fd, 5000));
	area = zoo_map(16384, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd);
	area[4999] = 1;
	TRY(sigaction(SIGBUS, &sa, NULL));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(area[4999], 1);
	CHECK_EQ(area[0], 0);
	if (!sigsetjmp(fault, 1)) {
		area[8192] = 1;
		zoo_fail("no SIGBUS past the end of the file");
	}
	zoo_pass();
}
