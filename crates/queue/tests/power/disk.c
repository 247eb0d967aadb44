// A library that is loaded before all others, and notes what fsync(2) has put on stable storage below a
// directory: the content of files, and the names in directories. What it does not note may be lost with the
// power. The names of what it writes are those of inodes, which outlive a rename.

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int opened(const char *path, int flags, mode_t mode)
{
	return openat(AT_FDCWD, path, flags | O_CLOEXEC, mode);
}

// What names an inode: its number may be given again, but not within the same nanosecond.
static int name_inode(int dir, const char *path, char *name, size_t size, mode_t *mode)
{
	struct statx at;
	int flags = AT_SYMLINK_NOFOLLOW | (*path ? 0 : AT_EMPTY_PATH);

	if (statx(dir, path, flags, STATX_INO | STATX_TYPE | STATX_BTIME, &at))
		return -1;
	*mode = at.stx_mode;
	long long seconds = at.stx_mask & STATX_BTIME ? at.stx_btime.tv_sec : 0;
	unsigned nanos = at.stx_mask & STATX_BTIME ? at.stx_btime.tv_nsec : 0;
	snprintf(name, size, "%llu-%lld-%u", (unsigned long long)at.stx_ino, seconds, nanos);
	return 0;
}

static void copy_file(int from, int to)
{
	char buffer[65536];
	ssize_t count;

	while ((count = read(from, buffer, sizeof(buffer))) > 0)
		if (write(to, buffer, count) != count)
			abort();
}

static char kind_of(mode_t mode)
{
	return S_ISDIR(mode) ? 'd' : S_ISREG(mode) ? 'f' : S_ISLNK(mode) ? 'l' : 'o';
}

// Where a symbolic link leads, which never changes, is synced with its name.
static void note_link(int dir, const char *entry, const char *inode)
{
	char target[PATH_MAX], kept[PATH_MAX];
	ssize_t length = readlinkat(dir, entry, target, sizeof(target));

	snprintf(kept, sizeof(kept), "%s/%s", getenv("TORPOR_DISK_SYNCED"), inode);
	int to = opened(kept, O_WRONLY | O_CREAT | O_TRUNC, 0600);
	if (length < 0 || to < 0 || write(to, target, length) != length)
		abort();
	close(to);
}

// A line for each entry: its inode, what kind it is, its name.
static void list_names(int from, int to)
{
	DIR *dir = fdopendir(from);
	struct dirent *entry;
	char name[64];
	mode_t mode;

	while (dir && (entry = readdir(dir))) {
		if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
			continue;
		if (name_inode(dirfd(dir), entry->d_name, name, sizeof(name), &mode))
			continue;
		dprintf(to, "%s %c %s\n", name, kind_of(mode), entry->d_name);
		if (S_ISLNK(mode))
			note_link(dirfd(dir), entry->d_name, name);
	}
	if (dir)
		closedir(dir);
}

// Of two who note the same at the same time the later one counts. The locks of files that a child would
// inherit are of no use here, nor is a mutex: jobs are brought back by fork(2).
static _Atomic pid_t at_work;

static int begin(const char *synced)
{
	struct flock whole = { .l_type = F_WRLCK, .l_whence = SEEK_SET };
	pid_t own = getpid(), owner = 0;
	char path[PATH_MAX];

	while (!atomic_compare_exchange_strong(&at_work, &owner, own)) {
		// That of a parent is not this one's.
		if (owner == own) {
			usleep(50);
			owner = 0;
		}
	}
	snprintf(path, sizeof(path), "%s/lock", synced);
	int lock = opened(path, O_RDWR | O_CREAT, 0600);
	while (fcntl(lock, F_SETLKW, &whole) && errno == EINTR)
		;
	return lock;
}

static void end(int lock)
{
	close(lock);
	atomic_store(&at_work, 0);
}

// The power fails at a sync: `power` says how many come before it. Nothing of that one is on stable storage, and
// nothing of later ones. Whoever waits for them is killed, or ends when the disk is a new one.
static void fail_if_due(const char *synced)
{
	char power[PATH_MAX], failed[PATH_MAX], text[32] = "";

	snprintf(power, sizeof(power), "%s/power", synced);
	snprintf(failed, sizeof(failed), "%s/failed", synced);
	int file = opened(power, O_RDWR, 0);
	if (file < 0)
		return;
	if (read(file, text, sizeof(text) - 1) < 0)
		abort();
	long left = strtol(text, NULL, 10);
	if (left > 0) {
		int length = snprintf(text, sizeof(text), "%ld", left - 1);
		if (ftruncate(file, 0) || pwrite(file, text, length, 0) != length)
			abort();
		close(file);
		return;
	}
	close(file);
	close(opened(failed, O_WRONLY | O_CREAT, 0600));
	while (!access(failed, F_OK))
		usleep(1000);
	_exit(1);
}

static void note(int fd)
{
	const char *disk = getenv("TORPOR_DISK"), *synced = getenv("TORPOR_DISK_SYNCED");
	char link[64], path[PATH_MAX], name[64], fresh[PATH_MAX], kept[PATH_MAX];
	mode_t mode;

	if (!disk || !synced)
		return;
	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	ssize_t length = readlink(link, path, sizeof(path) - 1);
	if (length < 0 || strncmp(path, disk, strlen(disk)) || name_inode(fd, "", name, sizeof(name), &mode))
		return;
	int lock = begin(synced);
	fail_if_due(synced);
	snprintf(fresh, sizeof(fresh), "%s/new", synced);
	snprintf(kept, sizeof(kept), "%s/%s", synced, name);
	int from = opened(link, O_RDONLY, 0), to = opened(fresh, O_WRONLY | O_CREAT | O_TRUNC, 0600);
	if (from < 0 || to < 0)
		abort();
	if (S_ISDIR(mode)) {
		list_names(from, to);
	} else {
		copy_file(from, to);
		close(from);
	}
	close(to);
	rename(fresh, kept);
	end(lock);
}

static int synced_by(const char *call, int fd)
{
	int (*real)(int) = dlsym(RTLD_NEXT, call);
	int result = real(fd);

	if (!result)
		note(fd);
	return result;
}

int fsync(int fd)
{
	return synced_by("fsync", fd);
}

int fdatasync(int fd)
{
	return synced_by("fdatasync", fd);
}

// The power was away: this is another boot of the machine.
static const char *in_this_boot(const char *path)
{
	const char *boot = getenv("TORPOR_DISK_BOOT");

	return boot && !strcmp(path, "/proc/sys/kernel/random/boot_id") ? boot : path;
}

int open(const char *path, int flags, ...)
{
	int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
	va_list rest;

	va_start(rest, flags);
	mode_t mode = va_arg(rest, mode_t);
	va_end(rest);
	return real(in_this_boot(path), flags, mode);
}

int open64(const char *path, int flags, ...)
{
	int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open64");
	va_list rest;

	va_start(rest, flags);
	mode_t mode = va_arg(rest, mode_t);
	va_end(rest);
	return real(in_this_boot(path), flags, mode);
}
