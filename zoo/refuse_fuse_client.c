// area: refusals
// shows: a file of a FUSE file system that another task of the tree serves is refused, and nobody waits for the server
// modes: plain leave-running
// expect: refused "lies on a FUSE file system that task"
#include "fuse_server.h"

int main(void)
{
	pid_t server = fuse_serve("file");
	char text[16] = "";
	int file = TRY(open("file", O_RDONLY));

	CHECK(TRY(read(file, text, sizeof text - 1)) > 0);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(pread(file, text, sizeof text - 1, 0), 6);
	TRY(close(file));
	TRY(kill(server, SIGKILL));
	zoo_reap(server);
	zoo_pass();
}
