// area: memory
// shows: 20,000 areas, private file pages between anonymous ones
// foreign: yes
#include "zoo.h"

#define PAGE 4096
#define COUNT 10000

int main(void)
{
	int fd = TRY(open("file", O_RDWR | O_CREAT, 0600));
	char page[PAGE], *area;

	for (int i = 0; i < COUNT; i++) {
		zoo_fill(page, PAGE, i);
		CHECK_EQ(write(fd, page, PAGE), PAGE);
	}
	area = zoo_map(2ul * COUNT * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	for (int i = 0; i < COUNT; i++) {
		char *at = area + 2ul * i * PAGE;

		CHECK(mmap(at, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd, (off_t)i * PAGE) == at);
		at[PAGE] = (char)i;
		if (i % 3 == 0)
			at[8] = 77;
	}
	close(fd);
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < COUNT; i++) {
		char *at = area + 2ul * i * PAGE;

		zoo_fill(page, PAGE, i);
		if (i % 3 == 0)
			page[8] = 77;
		CHECK(memcmp(at, page, PAGE) == 0);
		CHECK_EQ(at[PAGE], (char)i);
	}
	zoo_pass();
}
