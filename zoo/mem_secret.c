// area: memory
// shows: a secret memory area cannot be read from outside: the dump is refused
// expect: refused "secret"
#include "zoo.h"

int main(void)
{
	int fd = (int)syscall(SYS_memfd_secret, 0);
	char *area;

	if (fd < 0)
		zoo_skip("no memfd_secret");
	TRY(ftruncate(fd, 8192));
	area = zoo_map(8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd);
	zoo_fill(area, 8192, 1);
	close(fd);
	zoo_ready();
	zoo_wait();
	CHECK(zoo_filled(area, 8192, 1));
	zoo_pass();
}
