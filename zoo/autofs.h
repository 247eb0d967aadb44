/* Automatic mounts: how they are made, and how their daemon answers. */
#include <linux/auto_fs.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

/* Has the group of the calling process asked through the pipe that `fd` writes to for what is missing at `path`;
 * what is returned answers, or is below 0. `type` is indirect or direct. */
static inline int autofs_mount(const char *path, int fd, const char *type)
{
	char options[128];

	if (mkdir(path, 0755))
		return -1;
	snprintf(options, sizeof options, "fd=%d,pgrp=%d,minproto=5,maxproto=5,%s", fd, (int)getpgrp(), type);
	if (mount("zoo", path, "autofs", 0, options))
		return -1;
	return open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

/* Reads what somebody waits for. */
static inline void autofs_read(int fd, union autofs_v5_packet_union *asked)
{
	CHECK(TRY(read(fd, asked, sizeof *asked)) >= (ssize_t)sizeof asked->hdr);
}

/* Has a child wait for a mount below a new automatic one, whose daemon is the calling process: it reads what is
 * asked from the pipe. What is returned answers. */
static inline int autofs_awaited(int fds[2], pid_t *child)
{
	int root;

	if (getpid() != getpgrp())
		TRY(setpgid(0, 0));
	TRY(pipe(fds));
	root = autofs_mount("automatic", fds[1], "indirect");
	if (root < 0)
		zoo_skip("no autofs");
	*child = TRY(fork());
	if (!*child) {
		TRY(setpgid(0, 0));
		_exit(access("automatic/key", F_OK) ? errno : 0);
	}
	return root;
}
