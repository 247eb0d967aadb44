// area: refusals
// shows: a server of a FUSE file system, which is mounted, is refused
// modes: plain leave-running
// expect: refused "a FUSE file system is served through it"
#include "fuse_server.h"

int main(void)
{
	pid_t server = fuse_serve("file");

	CHECK(!strcmp(zoo_slurp("file"), "read 1"));
	zoo_ready();
	zoo_wait();
	CHECK(!strcmp(zoo_slurp("file"), "read 2"));
	TRY(kill(server, SIGKILL));
	zoo_reap(server);
	zoo_pass();
}
