/*
 * What every program of the zoo shares: the conversation with the harness.
 *
 * A program sets up its state, calls zoo_ready(), stays in zoo_wait() (or works on while zoo_go() is
 * false) while it is dumped and restored, then verifies its state and ends with zoo_pass(). The
 * conversation uses nothing but files in the start directory, looked at by path: no descriptor,
 * signal, timer or mapping that could get in the way of what is tested.
 */
#ifndef ZOO_H
#define ZOO_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static char zoo_dir[PATH_MAX];

/* The start directory is noted before main(), since a program may leave it. */
__attribute__((constructor)) static void zoo_init(void)
{
	if (!getcwd(zoo_dir, sizeof zoo_dir - 16))
		_exit(99);
}

static inline const char *zoo_path(const char *name)
{
	static __thread char path[2 * PATH_MAX];

	snprintf(path, sizeof path, "%s/%s", zoo_dir, name);
	return path;
}

/* Makes a file appear with its whole content at once; the first writer wins. */
static inline void zoo_write(const char *name, const char *text)
{
	char tmp[PATH_MAX + 32];
	int fd;

	snprintf(tmp, sizeof tmp, "%s/.%s.%d", zoo_dir, name, (int)syscall(SYS_gettid));
	fd = open(tmp, O_CREAT | O_WRONLY | O_TRUNC | O_CLOEXEC, 0644);
	if (fd < 0 || write(fd, text, strlen(text)) < 0)
		_exit(98);
	close(fd);
	if (syscall(SYS_renameat2, AT_FDCWD, tmp, AT_FDCWD, zoo_path(name), RENAME_NOREPLACE) < 0 &&
	    (errno != EEXIST || unlink(tmp)))
		_exit(97);
}

/* Ends the calling process with a verdict; children may call these too. */
__attribute__((noreturn, format(printf, 1, 2))) static inline void zoo_fail(const char *fmt, ...)
{
	char why[1024] = "fail: ";
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(why + 6, sizeof why - 6, fmt, ap);
	va_end(ap);
	zoo_write("result", why);
	_exit(1);
}

/* This machine or kernel has no such thing; to be called before zoo_ready(). */
__attribute__((noreturn)) static inline void zoo_skip(const char *why)
{
	char text[512];

	snprintf(text, sizeof text, "skip: %s", why);
	zoo_write("result", text);
	_exit(0);
}

__attribute__((noreturn)) static inline void zoo_pass(void)
{
	zoo_write("result", "pass");
	_exit(0);
}

/* CHECK(condition) ends the program with a failure; TRY(call) also hands back the call's result. */
#define CHECK(cond)                                                                          \
	do {                                                                                 \
		if (!(cond))                                                                 \
			zoo_fail("%s:%d: %s (errno %d, %s)", __FILE__, __LINE__, #cond, errno, \
				 strerror(errno));                                           \
	} while (0)
#define CHECK_EQ(got, want)                                                                  \
	do {                                                                                 \
		long long got_ = (long long)(got), want_ = (long long)(want);                \
		if (got_ != want_)                                                           \
			zoo_fail("%s:%d: %s is %lld (0x%llx), expected %lld (0x%llx), errno %d", \
				 __FILE__, __LINE__, #got, got_, got_, want_, want_, errno); \
	} while (0)
#define TRY(call)                                                                            \
	({                                                                                   \
		__typeof__(call) result_ = (call);                                           \
		if (result_ == (__typeof__(call))-1)                                         \
			zoo_fail("%s:%d: %s: errno %d, %s", __FILE__, __LINE__, #call, errno, \
				 strerror(errno));                                           \
		result_;                                                                     \
	})

static inline void zoo_ready(void)
{
	zoo_write("ready", "");
}

/* True from when the harness has asked for the check. */
static inline bool zoo_go(void)
{
	return access(zoo_path("check"), F_OK) == 0;
}

static inline void zoo_sleep_ms(long ms)
{
	struct timespec t = { ms / 1000, ms % 1000 * 1000000 };

	/* A sleep may come back early with EINTR after a restore, as after a signal: what is left of it
	 * follows, or a program that counts sleeps would have no patience where a timer runs. */
	while (nanosleep(&t, &t) && errno == EINTR)
		;
}

static inline void zoo_wait(void)
{
	while (!zoo_go())
		zoo_sleep_ms(5);
}

/* Waits for a condition, for at most a minute or so. */
#define WAIT_UNTIL(cond)                                                                     \
	do {                                                                                 \
		int left_ = 12000;                                                           \
		while (!(cond)) {                                                            \
			if (--left_ == 0)                                                    \
				zoo_fail("%s:%d: never became true: %s", __FILE__, __LINE__, #cond); \
			zoo_sleep_ms(5);                                                     \
		}                                                                            \
	} while (0)

/* Lets one task of a program tell another how far it has come. */
static inline void zoo_tell(const char *step)
{
	zoo_write(step, "");
}

#define zoo_await(step) WAIT_UNTIL(access(zoo_path(step), F_OK) == 0)

/* Has children be born in a pid namespace, of that path. */
static inline void zoo_enter_pid(const char *path)
{
	int fd = TRY(open(path, O_RDONLY));

	TRY(setns(fd, CLONE_NEWPID));
	TRY(close(fd));
}

/* Waits for a child and returns its status; ends the program if there is none. */
static inline int zoo_reap(pid_t pid)
{
	int status;

	while (waitpid(pid, &status, 0) < 0)
		CHECK(errno == EINTR);
	return status;
}

#define CHECK_EXIT(pid, code)                                                                \
	do {                                                                                 \
		int status_ = zoo_reap(pid);                                                 \
		CHECK(WIFEXITED(status_));                                                   \
		CHECK_EQ(WEXITSTATUS(status_), code);                                        \
	} while (0)

/* Fills memory with a pattern that depends on a seed and the place, and verifies it. */
static inline void zoo_fill(void *at, size_t len, uint64_t seed)
{
	uint64_t *p = at, x = seed * 0x9e3779b97f4a7c15u + 1;

	for (size_t i = 0; i < len / 8; i++, x = x * 6364136223846793005u + 1442695040888963407u)
		p[i] = x;
}

static inline bool zoo_filled(const void *at, size_t len, uint64_t seed)
{
	const uint64_t *p = at;
	uint64_t x = seed * 0x9e3779b97f4a7c15u + 1;

	for (size_t i = 0; i < len / 8; i++, x = x * 6364136223846793005u + 1442695040888963407u)
		if (p[i] != x)
			return false;
	return true;
}

static inline void *zoo_map(size_t len, int prot, int flags, int fd)
{
	void *p = mmap(NULL, len, prot, flags, fd, 0);

	CHECK(p != MAP_FAILED);
	return p;
}

/* A process whose first thread has ended can only be opened by another thread (Linux 6.9). */
static inline void zoo_need_pidfds_of_threads(void)
{
	int fd = syscall(SYS_pidfd_open, getpid(), O_EXCL);

	if (fd < 0)
		zoo_skip("no pidfds of threads");
	close(fd);
}

/* Reads a small file whole, as a string. */
static inline char *zoo_slurp(const char *path)
{
	static __thread char text[1 << 16];
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n, used = 0;

	if (fd < 0)
		zoo_fail("open %s: %s", path, strerror(errno));
	while ((n = read(fd, text + used, sizeof text - 1 - used)) > 0)
		used += n;
	close(fd);
	memset(text + used, 0, sizeof text - used);
	return text;
}

#endif
