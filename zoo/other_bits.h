/* A child that runs a program of the other kind (32-bit, 64-bit) than its parent. */
#pragma once
#include "zoo.h"

/* Writes a program into a file, whose name begins with "./", and starts it. 0 if this kernel does not run it. */
static inline pid_t other_bits_start(const char *name, const unsigned char *program, size_t len)
{
	int fd = TRY(open(name, O_WRONLY | O_CREAT, 0700)), status;
	char path[64], exe[PATH_MAX] = "";
	pid_t child;

	CHECK_EQ(write(fd, program, len), len);
	TRY(close(fd));
	child = TRY(fork());
	if (!child) {
		execl(name, name, NULL);
		_exit(77);
	}
	snprintf(path, sizeof path, "/proc/%d/exe", child);
	while (!strstr(exe, name + 1)) {
		if (waitpid(child, &status, WNOHANG) == child)
			return 0;
		exe[readlink(path, exe, sizeof exe - 1) > 0 ? sizeof exe - 1 : 0] = 0;
	}
	return child;
}

/* It still runs, and ends when it is killed. */
static inline void other_bits_end(pid_t child)
{
	int status;

	CHECK_EQ(waitpid(child, &status, WNOHANG), 0);
	TRY(kill(child, SIGKILL));
	CHECK_EQ(waitpid(child, &status, 0), child);
	CHECK_EQ(status, SIGKILL);
}
