// area: unlinked files
// shows: a file that never had a name (O_TMPFILE)
// foreign: yes
#include "zoo.h"

int main(void)
{
	int fd = open(".", O_RDWR | O_TMPFILE, 0640);
	struct stat st;
	char text[4];

	if (fd < 0)
		zoo_skip("no O_TMPFILE here");
	CHECK_EQ(write(fd, "abcd", 4), 4);
	zoo_ready();
	zoo_wait();
	TRY(fstat(fd, &st));
	CHECK_EQ(st.st_mode, S_IFREG | 0640);
	CHECK_EQ(st.st_nlink, 0);
	CHECK_EQ(pread(fd, text, 4, 0), 4);
	CHECK(memcmp(text, "abcd", 4) == 0);
	zoo_pass();
}
