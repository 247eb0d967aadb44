/* Control groups. */
#ifndef ZOO_CGROUP_H
#define ZOO_CGROUP_H

#include "zoo.h"

/* Goes into the group of this path, alone. */
static inline void enter(const char *group)
{
	char path[PATH_MAX], pid[16];
	int fd;

	snprintf(path, sizeof path, "%s/cgroup.procs", group);
	snprintf(pid, sizeof pid, "%d", getpid());
	fd = TRY(open(path, O_WRONLY));
	CHECK(write(fd, pid, strlen(pid)) > 0);
	TRY(close(fd));
}

#endif
