// area: mounts
// shows: formats of programs of a user namespace (binfmt_misc) are registered again, in their order
// modes: userns
#include "zoo.h"
#include <sys/mount.h>

static void put(const char *path, const char *text)
{
	int fd = TRY(open(path, O_WRONLY | O_CREAT, 0755));

	CHECK_EQ(write(fd, text, strlen(text)), strlen(text));
	TRY(close(fd));
}

/* Whether the file says so. */
static void says(const char *path, const char *want)
{
	char text[512] = "";
	int fd = TRY(open(path, O_RDONLY));

	TRY(read(fd, text, sizeof text - 1));
	TRY(close(fd));
	if (strcmp(text, want))
		zoo_fail("%s says %s, not %s", path, text, want);
}

static int run(const char *program)
{
	pid_t child = TRY(fork());
	int status;

	if (!child) {
		execl(program, program, NULL);
		_exit(errno == ENOEXEC ? 88 : 89);
	}
	while (waitpid(child, &status, 0) < 0)
		CHECK(errno == EINTR);
	CHECK(WIFEXITED(status));
	return WEXITSTATUS(status);
}

int main(int argc, char **argv)
{
	char self[PATH_MAX] = "", line[4 * PATH_MAX], other[2 * PATH_MAX];

	/* As an interpreter: which one it is shows in its name. */
	if (argc > 1)
		_exit(strstr(argv[0], "second") ? 2 : 1);
	TRY(readlink("/proc/self/exe", self, sizeof self - 1));
	TRY(mkdir("formats", 0755));
	if (mount("binfmt", "formats", "binfmt_misc", 0, NULL))
		zoo_skip("no binfmt_misc in a user namespace");
	snprintf(other, sizeof other, "%s/second", zoo_dir);
	TRY(symlink(self, other));
	snprintf(line, sizeof line, ":first:M:1:a\\x00b:\\xff\\x00\\xff:%s:", self);
	put("formats/register", line);
	snprintf(line, sizeof line, ":second:M:1:a\\x00b:\\xff\\x00\\xff:%s:F", other);
	put("formats/register", line);
	snprintf(line, sizeof line, ":off:E::none::%s:OC", self);
	put("formats/register", line);
	put("formats/off", "0");
	put("program", "?azb");
	TRY(chmod("program", 0755));
	CHECK_EQ(run("./program"), 2);
	zoo_ready();
	zoo_wait();
	snprintf(line, sizeof line, "enabled\ninterpreter %s\nflags: \noffset 1\nmagic 610062\nmask ff00ff\n", self);
	says("formats/first", line);
	snprintf(line, sizeof line, "disabled\ninterpreter %s\nflags: OC\nextension .none\n", self);
	says("formats/off", line);
	CHECK_EQ(run("./program"), 2);
	put("formats/second", "-1");
	CHECK_EQ(run("./program"), 1);
	zoo_pass();
}
