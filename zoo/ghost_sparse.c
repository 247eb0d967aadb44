// area: unlinked files
// shows: an unlinked sparse file of 2 GiB with data at three places stays sparse
// foreign: yes
// dump: --ghost-limit 16M
#include "zoo.h"

#define SIZE (2ll << 30)

int main(void)
{
	off_t places[] = { 0, 1ll << 30, SIZE - 4096 };
	int fd = TRY(open("sparse", O_RDWR | O_CREAT, 0600));
	char out[4096], in[4096];
	struct stat st;

	TRY(ftruncate(fd, SIZE));
	for (int i = 0; i < 3; i++) {
		zoo_fill(out, sizeof out, i);
		CHECK_EQ(pwrite(fd, out, sizeof out, places[i]), sizeof out);
	}
	TRY(unlink("sparse"));
	zoo_ready();
	zoo_wait();
	TRY(fstat(fd, &st));
	CHECK_EQ(st.st_size, SIZE);
	CHECK(st.st_blocks < 1000);
	for (int i = 0; i < 3; i++) {
		CHECK_EQ(pread(fd, in, sizeof in, places[i]), sizeof in);
		CHECK(zoo_filled(in, sizeof in, i));
	}
	CHECK_EQ(pread(fd, in, 1, SIZE / 4), 1);
	CHECK_EQ(in[0], 0);
	zoo_pass();
}
