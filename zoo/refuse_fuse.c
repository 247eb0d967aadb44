// area: refusals
// shows: a server of a FUSE file system is refused
// modes: plain leave-running
// expect: refused "a FUSE file system is served through it"
#include "zoo.h"

int main(void)
{
	int fd = open("/dev/fuse", O_RDWR);

	if (fd < 0)
		zoo_skip("no FUSE");
	zoo_ready();
	zoo_wait();
	TRY(close(fd));
	zoo_pass();
}
