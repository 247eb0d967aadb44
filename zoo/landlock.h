/* Confinement by Landlock that leaves no descriptor behind. */
#ifndef ZOO_LANDLOCK_H
#define ZOO_LANDLOCK_H

#include "zoo.h"
#include <linux/landlock.h>
#include <sys/prctl.h>

static inline void restrict_by(int fd)
{
	TRY(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	TRY(syscall(SYS_landlock_restrict_self, fd, 0));
	TRY(close(fd));
}

static inline int no_directories(void)
{
	struct landlock_ruleset_attr attr = { .handled_access_fs = LANDLOCK_ACCESS_FS_MAKE_DIR };
	int fd = (int)syscall(SYS_landlock_create_ruleset, &attr, sizeof attr, 0);

	if (fd < 0)
		zoo_skip("no landlock");
	return fd;
}

/* From here on the thread makes no directories. */
static inline void confine(void)
{
	restrict_by(no_directories());
}

/* What the kernel answers to one more layer. */
static inline int one_more(void)
{
	int fd = no_directories(), answer = (int)syscall(SYS_landlock_restrict_self, fd, 0), error = errno;

	TRY(close(fd));
	errno = error;
	return answer;
}

#endif
