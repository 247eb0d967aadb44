// area: credentials
// shows: who has logged in, by the id that the user namespace has for that user
// modes: plain ns userns
// foreign: yes
#include "zoo.h"

int main(void)
{
	int fd = open("/proc/self/loginuid", O_WRONLY);

	if (fd < 0 || write(fd, "1000", 4) != 4)
		zoo_skip("nobody may say who has logged in");
	TRY(close(fd));
	CHECK(!strcmp(zoo_slurp("/proc/self/loginuid"), "1000"));
	zoo_ready();
	zoo_wait();
	CHECK(!strcmp(zoo_slurp("/proc/self/loginuid"), "1000"));
	zoo_pass();
}
