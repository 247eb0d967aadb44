// area: unlinked files
// shows: an unlinked file of 8 MiB with a thousand holes
// dump: --ghost-limit 16M
// foreign: yes
#include "zoo.h"

int main(void)
{
	int fd = TRY(open("holes", O_RDWR | O_CREAT, 0600));
	char page[4096];
	struct stat before, after;

	TRY(ftruncate(fd, 8 << 20));
	for (int i = 0; i < 1024; i++) {
		zoo_fill(page, sizeof page, i);
		CHECK_EQ(pwrite(fd, page, sizeof page, i * 8192l), sizeof page);
	}
	TRY(fsync(fd));
	TRY(unlink("holes"));
	TRY(fstat(fd, &before));
	zoo_ready();
	zoo_wait();
	TRY(fsync(fd));
	TRY(fstat(fd, &after));
	CHECK_EQ(after.st_size, before.st_size);
	CHECK(after.st_blocks < before.st_blocks + 200);
	for (int i = 0; i < 1024; i++) {
		CHECK_EQ(pread(fd, page, sizeof page, i * 8192l), sizeof page);
		CHECK(zoo_filled(page, sizeof page, i));
	}
	zoo_pass();
}
