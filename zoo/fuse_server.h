/* A task of a program that serves a FUSE file system. fuse.h stands apart: others than the zoo use it. */
#include "zoo.h"
#include "fuse.h"

/* Mounts the file over `path`, in a mount namespace of the caller's own, and starts its server. */
static inline pid_t fuse_serve(const char *path)
{
	int fd = open("/dev/fuse", O_RDWR), file = TRY(open(path, O_RDWR | O_CREAT, 0600));
	unsigned reads = 0;
	pid_t server;

	if (fd < 0)
		zoo_skip("no FUSE");
	TRY(close(file));
	TRY(unshare(CLONE_NEWNS));
	TRY(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL));
	if (fuse_mount(fd, path, 0))
		zoo_skip("no FUSE file systems");
	server = TRY(fork());
	if (!server)
		while (fuse_answer(fd, &reads))
			;
	TRY(close(fd));
	return server;
}
