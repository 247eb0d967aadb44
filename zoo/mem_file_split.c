// area: memory
// shows: a shared file mapping split by protection: its read-only half can be made writable later
// foreign: yes
#include "zoo.h"

#define PAGE 4096

int main(void)
{
	int fd = TRY(open("file", O_RDWR | O_CREAT, 0600));
	char *area, page[PAGE];

	TRY(ftruncate(fd, 2 * PAGE));
	area = zoo_map(2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd);
	close(fd);
	zoo_fill(area, 2 * PAGE, 8);
	TRY(mprotect(area, PAGE, PROT_READ));
	zoo_ready();
	zoo_wait();
	CHECK(zoo_filled(area, 2 * PAGE, 8));
	TRY(mprotect(area, PAGE, PROT_READ | PROT_WRITE));
	zoo_fill(area, PAGE, 9);
	fd = TRY(open("file", O_RDONLY));
	CHECK_EQ(read(fd, page, PAGE), PAGE);
	CHECK(zoo_filled(page, PAGE, 9));
	zoo_pass();
}
