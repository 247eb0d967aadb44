// area: unlinked files
// shows: unlinked files with a hole at the head and at the tail, and one that is a single hole of 1 GiB
// foreign: yes
#include "zoo.h"

int main(void)
{
	int head = TRY(open("head", O_RDWR | O_CREAT, 0600)), tail = TRY(open("tail", O_RDWR | O_CREAT, 0600));
	int hole = TRY(open("hole", O_RDWR | O_CREAT, 0600));
	struct stat st;
	char c;

	CHECK_EQ(pwrite(head, "x", 1, 1 << 20), 1);
	CHECK_EQ(pwrite(tail, "x", 1, 0), 1);
	TRY(ftruncate(tail, 1 << 20));
	TRY(ftruncate(hole, 1 << 30));
	TRY(unlink("head"));
	TRY(unlink("tail"));
	TRY(unlink("hole"));
	zoo_ready();
	zoo_wait();
	TRY(fstat(head, &st));
	CHECK_EQ(st.st_size, (1 << 20) + 1);
	CHECK(st.st_blocks < 100);
	CHECK(pread(head, &c, 1, 1 << 20) == 1 && c == 'x');
	TRY(fstat(tail, &st));
	CHECK_EQ(st.st_size, 1 << 20);
	CHECK(st.st_blocks < 100);
	CHECK(pread(tail, &c, 1, 0) == 1 && c == 'x');
	TRY(fstat(hole, &st));
	CHECK_EQ(st.st_size, 1 << 30);
	CHECK_EQ(st.st_blocks, 0);
	zoo_pass();
}
