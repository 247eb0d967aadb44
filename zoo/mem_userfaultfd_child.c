// area: memory
// shows: a process whose missing pages another one brings in, with a userfaultfd that both have and its own at the same place
// foreign: no CRIU keeps no userfaultfd
#include "userfaultfd.h"

int main(void)
{
	char *area = zoo_map(4 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	int own, fd = uffd_open(0, 0);
	pthread_t thread;
	pid_t child;

	uffd_register(fd, area, 4 * 4096, UFFDIO_REGISTER_MODE_MISSING);
	uffd_fill(fd, area, 'a');
	child = TRY(fork());
	if (!child) {
		own = uffd_open(0, 0);
		uffd_register(own, area, 4 * 4096, UFFDIO_REGISTER_MODE_MISSING);
		zoo_tell("child");
		zoo_wait();
		CHECK_EQ(area[0], 'a');
		uffd_expect(fd, area + 4096);
		uffd_fill(fd, area + 4096, 'b');
		thread = uffd_start(uffd_reader, area + 4096);
		uffd_expect(own, area + 4096);
		uffd_fill(own, area + 4096, 'c');
		CHECK_EQ(uffd_join(thread), 'c');
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK_EQ(area[0], 'a');
	CHECK_EQ(area[4096], 'b');
	CHECK_EXIT(child, 0);
	zoo_pass();
}
