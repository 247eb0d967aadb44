// area: refusals
// shows: a server of a FUSE file system, which is mounted, is refused
// modes: plain leave-running
// expect: refused "a FUSE file system is served through it"
#include "zoo.h"
#include "fuse.h"

int main(void)
{
	int fd = open("/dev/fuse", O_RDWR), file = TRY(open("file", O_RDWR | O_CREAT, 0600));
	unsigned reads = 0;
	pid_t server;

	if (fd < 0)
		zoo_skip("no FUSE");
	TRY(close(file));
	TRY(unshare(CLONE_NEWNS));
	TRY(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL));
	if (fuse_mount(fd, "file"))
		zoo_skip("no FUSE file systems");
	server = TRY(fork());
	if (!server)
		while (fuse_answer(fd, &reads))
			;
	TRY(close(fd));
	CHECK(!strcmp(zoo_slurp("file"), "read 1"));
	zoo_ready();
	zoo_wait();
	CHECK(!strcmp(zoo_slurp("file"), "read 2"));
	TRY(kill(server, SIGKILL));
	zoo_reap(server);
	zoo_pass();
}
