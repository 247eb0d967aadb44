// area: mounts
// shows: a file and its mapping, which the task has opened before it went into a mount namespace where another mount leads there
// modes: plain leave-running
// options: --external mnt[]
// varies: fd maps
// restore: --policy-rule foreign.mounts.sources=["/"]
// foreign: yes
#include "zoo.h"
#include <sys/mount.h>

int main(void)
{
	char text[8] = "", *map;
	int fd;

	TRY(mkdir("here", 0755));
	TRY(mkdir("there", 0755));
	fd = TRY(open("here/file", O_RDWR | O_CREAT, 0600));
	CHECK_EQ(write(fd, "before", 6), 6);
	map = zoo_map(4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd);
	TRY(unshare(CLONE_NEWNS));
	TRY(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL));
	TRY(mount("here", "there", NULL, MS_BIND, NULL));
	TRY(mount("tmpfs", "here", "tmpfs", 0, ""));
	zoo_ready();
	zoo_wait();
	CHECK(!memcmp(map, "before", 6));
	map[0] = 'B';
	CHECK_EQ(lseek(fd, 0, SEEK_CUR), 6);
	CHECK_EQ(pread(fd, text, 6, 0), 6);
	CHECK(!strcmp(text, "Before"));
	fd = TRY(open("there/file", O_RDONLY));
	CHECK_EQ(pread(fd, text, 6, 0), 6);
	CHECK(!strcmp(text, "Before"));
	CHECK(access("here/file", F_OK) < 0);
	zoo_pass();
}
