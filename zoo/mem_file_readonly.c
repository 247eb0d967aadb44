// area: memory
// shows: a shared mapping of a file opened only for reading cannot become writable
// foreign: yes
#include "zoo.h"

int main(void)
{
	int fd = TRY(open("file", O_RDWR | O_CREAT, 0644));
	char *area;

	CHECK_EQ(write(fd, "content", 7), 7);
	close(fd);
	fd = TRY(open("file", O_RDONLY));
	area = zoo_map(4096, PROT_READ, MAP_SHARED, fd);
	close(fd);
	zoo_ready();
	zoo_wait();
	CHECK(memcmp(area, "content", 8) == 0);
	CHECK(mprotect(area, 4096, PROT_READ | PROT_WRITE) < 0 && errno == EACCES);
	zoo_pass();
}
