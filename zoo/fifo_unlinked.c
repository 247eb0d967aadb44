// area: pipes
// shows: unlinked named pipes with data, open for both directions and through two descriptors
// foreign: yes
#include "zoo.h"

int main(void)
{
	int both, ro, wo;
	char text[8];
	struct stat st;

	TRY(mkfifo("both", 0640));
	both = TRY(open("both", O_RDWR));
	CHECK_EQ(write(both, "first", 5), 5);
	TRY(unlink("both"));
	TRY(mkfifo("split", 0600));
	ro = TRY(open("split", O_RDONLY | O_NONBLOCK));
	wo = TRY(open("split", O_WRONLY));
	CHECK_EQ(write(wo, "second", 6), 6);
	TRY(unlink("split"));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(read(both, text, 8), 5);
	CHECK(memcmp(text, "first", 5) == 0);
	CHECK_EQ(read(ro, text, 8), 6);
	CHECK(memcmp(text, "second", 6) == 0);
	CHECK_EQ(write(wo, "x", 1), 1);
	CHECK_EQ(read(ro, text, 8), 1);
	TRY(fstat(both, &st));
	CHECK_EQ(st.st_mode, S_IFIFO | 0640);
	CHECK_EQ(st.st_nlink, 0);
	CHECK(access("both", F_OK) < 0 && access("split", F_OK) < 0);
	zoo_pass();
}
