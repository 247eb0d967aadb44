// area: refusals
// shows: a file of a FUSE file system that another task of the tree serves is refused, and nobody waits for the server
// modes: plain leave-running
// expect: refused "lies on a FUSE file system that task"
#include "zoo.h"
#include "fuse.h"

int main(void)
{
	int fd = open("/dev/fuse", O_RDWR), file = TRY(open("file", O_RDWR | O_CREAT, 0600));
	char text[16] = "";
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
	file = TRY(open("file", O_RDONLY));
	CHECK(TRY(read(file, text, sizeof text - 1)) > 0);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(pread(file, text, sizeof text - 1, 0), 6);
	TRY(close(file));
	TRY(kill(server, SIGKILL));
	zoo_reap(server);
	zoo_pass();
}
