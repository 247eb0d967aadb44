// area: file locks
// shows: flock: locks that only mappings still hold, the descriptors being closed
// options: --file-locks
// foreign: no CRIU keeps locks of descriptors alone
#include "zoo.h"
#include <sys/file.h>

static void *map_locked(const char *name, int how, int prot, int flags)
{
	int fd = TRY(open(name, O_RDWR | O_CREAT, 0600));
	void *mapping;

	TRY(ftruncate(fd, 4096));
	TRY(flock(fd, how));
	mapping = zoo_map(4096, prot, flags, fd);
	TRY(close(fd));
	return mapping;
}

int main(void)
{
	char *ex = map_locked("exclusive", LOCK_EX, PROT_READ | PROT_WRITE, MAP_SHARED);
	char *sh = map_locked("shared", LOCK_SH, PROT_READ, MAP_PRIVATE);
	/* Held by a descriptor as well, which is a child's. */
	int both = TRY(open("both", O_RDWR | O_CREAT, 0600)), other_ex, other_sh, other_both;
	char *twice;
	pid_t child;

	TRY(ftruncate(both, 4096));
	TRY(flock(both, LOCK_EX));
	twice = zoo_map(4096, PROT_READ, MAP_SHARED, both);
	child = TRY(fork());
	if (child == 0) {
		munmap(ex, 4096);
		munmap(sh, 4096);
		munmap(twice, 4096);
		zoo_tell("child");
		zoo_await("checked");
		_exit(0);
	}
	zoo_await("child");
	TRY(close(both));
	other_ex = TRY(open("exclusive", O_RDWR));
	other_sh = TRY(open("shared", O_RDWR));
	other_both = TRY(open("both", O_RDWR));
	strcpy(ex, "written");
	zoo_ready();
	zoo_wait();
	CHECK(strcmp(ex, "written") == 0);
	CHECK(flock(other_ex, LOCK_SH | LOCK_NB) < 0 && errno == EWOULDBLOCK);
	CHECK(flock(other_sh, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK);
	CHECK(flock(other_both, LOCK_SH | LOCK_NB) < 0 && errno == EWOULDBLOCK);
	TRY(flock(other_sh, LOCK_SH | LOCK_NB));
	TRY(munmap(ex, 4096));
	TRY(flock(other_ex, LOCK_EX | LOCK_NB));
	TRY(munmap(sh, 4096));
	TRY(flock(other_sh, LOCK_EX | LOCK_NB));
	TRY(munmap(twice, 4096));
	zoo_tell("checked");
	CHECK_EXIT(child, 0);
	TRY(flock(other_both, LOCK_EX | LOCK_NB));
	zoo_pass();
}
