// area: files
// shows: an O_PATH descriptor on a symbolic link that was removed
// foreign: yes
#include "zoo.h"

int main(void)
{
	char text[64];
	int fd;

	TRY(symlink("where/it/points", "link"));
	fd = TRY(open("link", O_PATH | O_NOFOLLOW));
	TRY(unlink("link"));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(readlinkat(fd, "", text, sizeof text), 15);
	CHECK(memcmp(text, "where/it/points", 15) == 0);
	CHECK(access("link", F_OK) < 0);
	zoo_pass();
}
