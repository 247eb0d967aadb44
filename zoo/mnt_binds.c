// area: mounts
// shows: bind mounts of directories and files, read-only ones, names with blanks and backslashes
// modes: pidns ns userns
#include "zoo.h"
#include <sys/mount.h>

int main(void)
{
	const char *odd = "odd \t\\040 name";
	int fd;

	TRY(mkdir("from", 0755));
	TRY(mkdir("to", 0755));
	TRY(mkdir(odd, 0755));
	close(TRY(open("from/file", O_CREAT | O_RDWR, 0600)));
	close(TRY(open("to-file", O_CREAT | O_RDWR, 0600)));
	TRY(mount("from", "to", NULL, MS_BIND, NULL));
	TRY(mount(NULL, "to", NULL, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NODEV, NULL));
	TRY(mount("from/file", "to-file", NULL, MS_BIND, NULL));
	TRY(mount("from", odd, NULL, MS_BIND, NULL));
	fd = TRY(open("to/file", O_RDONLY));
	zoo_ready();
	zoo_wait();
	CHECK(open("to/file", O_RDWR) < 0 && errno == EROFS);
	close(TRY(open("from/new", O_CREAT | O_RDWR, 0600)));
	TRY(access("to/new", F_OK));
	TRY(chdir(odd));
	TRY(access("new", F_OK));
	TRY(chdir(".."));
	CHECK_EQ(write(TRY(open("to-file", O_WRONLY)), "text", 4), 4);
	CHECK(strcmp(zoo_slurp("from/file"), "text") == 0);
	CHECK(pread(fd, (char[4]){ 0 }, 4, 0) == 4);
	TRY(close(fd));
	TRY(umount("to"));
	CHECK(access("to/new", F_OK) < 0);
	zoo_pass();
}
