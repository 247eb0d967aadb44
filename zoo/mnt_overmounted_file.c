// area: mounts
// shows: an open file, a mapping and a working directory that a later mount hides
// modes: pidns ns sealed userns
#include "zoo.h"
#include <sys/mount.h>

int main(void)
{
	char text[8] = "", *map;
	int fd;

	TRY(mkdir("dir", 0755));
	TRY(mkdir("dir/inner", 0755));
	fd = TRY(open("dir/file", O_CREAT | O_RDWR, 0600));
	CHECK_EQ(write(fd, "hello", 5), 5);
	map = zoo_map(4096, PROT_READ, MAP_SHARED, fd);
	TRY(chdir("dir/inner"));
	TRY(mount("tmpfs", "..", "tmpfs", 0, ""));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(memcmp(map, "hello", 5), 0);
	CHECK_EQ(write(fd, "!", 1), 1);
	CHECK_EQ(map[5], '!');
	TRY(close(TRY(open("made", O_CREAT | O_WRONLY, 0600))));
	/* They keep their own mount busy, not the one that hides them. */
	TRY(umount(zoo_path("dir")));
	CHECK_EQ(pread(fd, text, 8, 0), 6);
	CHECK_EQ(memcmp(text, "hello!", 6), 0);
	TRY(access(zoo_path("dir/file"), F_OK));
	TRY(access(zoo_path("dir/inner/made"), F_OK));
	zoo_pass();
}
