// area: directories
// shows: a working directory that was removed, and is open as a descriptor as well
// foreign: yes
// options: --link-remap
#include "zoo.h"

int main(void)
{
	struct stat cwd, opened;
	char link[PATH_MAX] = { 0 };
	int fd;

	TRY(mkdir("gone", 0755));
	TRY(chdir("gone"));
	fd = TRY(open(".", O_RDONLY | O_DIRECTORY));
	TRY(rmdir("../gone"));
	zoo_ready();
	zoo_wait();
	TRY(stat(".", &cwd));
	TRY(fstat(fd, &opened));
	CHECK_EQ(cwd.st_ino, opened.st_ino);
	CHECK_EQ(cwd.st_nlink, 0);
	CHECK(!getcwd(link, sizeof link) && errno == ENOENT);
	CHECK(access(zoo_path("gone"), F_OK) < 0);
	zoo_pass();
}
