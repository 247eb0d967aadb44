// area: memory
// shows: a thread inside of a system call that waits for a page of a userfaultfd cannot be stopped: it is refused
// expect: refused "userfaultfd"
// modes: plain
#include "userfaultfd.h"

static int ends[2];

static void *send(void *at)
{
	CHECK_EQ(write(ends[1], at, 1), 1);
	return NULL;
}

int main(void)
{
	char c, path[64], *area = zoo_map(4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	int fd = uffd_open(O_CLOEXEC, 0);
	pthread_t thread;

	TRY(pipe(ends));
	uffd_register(fd, area, 4096, UFFDIO_REGISTER_MODE_MISSING);
	thread = uffd_start(send, area);
	snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd);
	WAIT_UNTIL(strstr(zoo_slurp(path), "pending:\t1\n"));
	zoo_ready();
	zoo_wait();
	uffd_expect(fd, area);
	uffd_fill(fd, area, 's');
	uffd_join(thread);
	CHECK_EQ(read(ends[0], &c, 1), 1);
	CHECK_EQ(c, 's');
	zoo_pass();
}
