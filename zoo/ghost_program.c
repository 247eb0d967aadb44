// area: unlinked files
// shows: programs that run on when their files are gone: one was removed, one has another in its place
// foreign: yes
#include "zoo.h"
#include <sys/sendfile.h>

/* Goes on as a copy of this program. */
static void become(const char *name)
{
	int from = TRY(open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
	int to = TRY(open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0755));

	while (TRY(sendfile(to, from, NULL, 1 << 20)) > 0)
		;
	TRY(fsync(to));
	close(to);
	TRY(setenv("ZOO_NAME", name, 1));
	TRY(execl(name, name, NULL));
}

static void check(const char *name)
{
	char is[PATH_MAX] = "", wanted[64], magic[4];
	int fd = TRY(open("/proc/self/exe", O_RDONLY));
	size_t len = snprintf(wanted, sizeof wanted, "/%s (deleted)", name);

	CHECK((size_t)TRY(readlink("/proc/self/exe", is, sizeof is - 1)) > len);
	CHECK(strcmp(is + strlen(is) - len, wanted) == 0);
	CHECK_EQ(read(fd, magic, 4), 4);
	CHECK(memcmp(magic, "\177ELF", 4) == 0);
	/* Nobody writes to a program that is run. */
	CHECK(open("/proc/self/exe", O_RDWR) < 0);
	CHECK_EQ(errno, ETXTBSY);
	close(fd);
}

int main(void)
{
	const char *name = getenv("ZOO_NAME");

	if (!name)
		become(TRY(fork()) == 0 ? "removed" : "replaced");
	TRY(unlink(name));
	if (strcmp(name, "removed") == 0) {
		check(name);
		zoo_tell("child");
		zoo_wait();
		check(name);
		_exit(7);
	}
	zoo_write(name, "another file");
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	check(name);
	int status;
	TRY(wait(&status));
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
	zoo_pass();
}
