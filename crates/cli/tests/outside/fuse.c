/* The server of a FUSE file system for a user, that somebody else has mounted, or it itself ("own"). It calls itself
   "sleep" when that is so. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "../../../../zoo/fuse.h"

/* Mounts it in a namespace of its own, keeps the connection open, and says who does so. */
static void hold(int fd, const char *path, unsigned user)
{
	FILE *told = fopen("holder", "w");

	if (!told || setsid() < 0 || unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
	    fuse_mount(fd, path, user))
		_exit(1);
	fprintf(told, "%d %d", getpid(), fd);
	if (fclose(told))
		_exit(1);
}

static int serve(int fd)
{
	unsigned reads = 0;

	if (prctl(PR_SET_NAME, "sleep"))
		return 1;
	while (fuse_answer(fd, &reads))
		;
	return 1;
}

int main(int argc, char **argv)
{
	int fd = open("/dev/fuse", O_RDWR), status = 1;
	unsigned user;
	int ends[2];
	pid_t child;
	char c;

	if (argc < 3 || chdir(argv[1]) || fd < 0)
		return 1;
	user = (unsigned)atoi(argv[2]);
	if (argc > 3)
		return fuse_mount(fd, "file", user) || serve(fd);
	if (pipe(ends))
		return 1;
	child = fork();
	if (child == 0) {
		if (fork())
			_exit(0);
		hold(fd, "file", user);
		close(ends[0]);
		close(ends[1]);
		for (;;)
			pause();
	}
	close(ends[1]);
	/* The one in between has ended, and the other has mounted it. */
	if (waitpid(child, &status, 0) != child || status || read(ends[0], &c, 1) || close(ends[0]))
		return 1;
	return serve(fd);
}
