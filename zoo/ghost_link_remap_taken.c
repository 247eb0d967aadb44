// area: unlinked files
// shows: a file that the dump gives a name, where all names that it would give are taken
// foreign: yes
// options: --link-remap
// modes: -leave-running
#include "zoo.h"
#include <dirent.h>

#define TAKEN 200

static const char *name_of(int i)
{
	static char name[32];

	snprintf(name, sizeof(name), "dir/link_remap.%d", i);
	return name;
}

static int names(void)
{
	DIR *dir = opendir("dir");
	int n = 0;

	CHECK(dir != NULL);
	while (readdir(dir))
		n++;
	closedir(dir);
	return n - 2;
}

int main(void)
{
	int fd, i;
	struct stat opened, named;

	TRY(mkdir("dir", 0700));
	for (i = 0; i < TAKEN; i++)
		close(TRY(open(name_of(i), O_WRONLY | O_CREAT, 0600)));
	fd = TRY(open("dir/one", O_RDWR | O_CREAT, 0600));
	TRY(link("dir/one", "two"));
	TRY(unlink("dir/one"));
	zoo_ready();
	zoo_wait();
	TRY(fstat(fd, &opened));
	TRY(stat("two", &named));
	CHECK_EQ(opened.st_ino, named.st_ino);
	CHECK_EQ(opened.st_nlink, 1);
	for (i = 0; i < TAKEN; i++)
		TRY(access(name_of(i), F_OK));
	CHECK_EQ(names(), TAKEN);
	zoo_pass();
}
