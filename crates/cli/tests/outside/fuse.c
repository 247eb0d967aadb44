/* The server of a FUSE file system for a user, that somebody else has mounted, or it itself: where it is ("own"), in a user
   namespace of its own ("owner"), or in one of a child, which serves it then ("below"). It calls itself "sleep" when that
   is so. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
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

/* Gives the parent the ids of root, and to a user there one of another user. */
static int map(const char *kind, unsigned user)
{
	char path[64], text[64];
	int fd, length = snprintf(text, sizeof text, "0 0 1\n%u %u 1\n", user, user + 1000);

	snprintf(path, sizeof path, "/proc/%d/%s_map", getppid(), kind);
	fd = open(path, O_WRONLY);
	return fd < 0 || write(fd, text, (size_t)length) != length || close(fd);
}

/* Goes into a user namespace, and into a mount namespace of that one. */
static int be_owner(unsigned user)
{
	int ends[2], status;
	pid_t child;
	char c;

	if (pipe(ends))
		return 1;
	child = fork();
	if (child == 0)
		_exit(read(ends[0], &c, 1) != 1 || map("uid", user) || map("gid", user));
	if (unshare(CLONE_NEWUSER | CLONE_NEWNS) || write(ends[1], "", 1) != 1)
		return 1;
	return waitpid(child, &status, 0) != child || status || close(ends[0]) || close(ends[1]);
}

static int own(unsigned user)
{
	int fd = open("/dev/fuse", O_RDWR);

	return fd < 0 || fuse_mount(fd, "file", user) || serve(fd);
}

/* Sleeps while a child serves, whose mount is there before. */
static int below(unsigned user)
{
	int ends[2], fd;
	char c;

	if (pipe(ends))
		return 1;
	if (fork() == 0) {
		if (prctl(PR_SET_PDEATHSIG, SIGKILL) || be_owner(user) || (fd = open("/dev/fuse", O_RDWR)) < 0 ||
		    fuse_mount(fd, "file", user) || write(ends[1], "", 1) != 1 || close(ends[0]) || close(ends[1]))
			_exit(1);
		_exit(serve(fd));
	}
	if (close(ends[1]) || read(ends[0], &c, 1) != 1 || close(ends[0]) || prctl(PR_SET_NAME, "sleep"))
		return 1;
	for (;;)
		pause();
}

/* Somebody else has the mount. */
static int other(unsigned user)
{
	int fd = open("/dev/fuse", O_RDWR), status = 1;
	int ends[2];
	pid_t child;
	char c;

	if (fd < 0 || pipe(ends))
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

int main(int argc, char **argv)
{
	const char *how = argc > 3 ? argv[3] : "";
	unsigned user;

	if (argc < 3 || chdir(argv[1]))
		return 1;
	user = (unsigned)atoi(argv[2]);
	if (!strcmp(how, "own"))
		return own(user);
	if (!strcmp(how, "owner"))
		return be_owner(user) || own(user);
	return strcmp(how, "below") ? other(user) : below(user);
}
