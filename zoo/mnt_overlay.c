// area: mounts
// shows: an overlay mount with a changed, a removed and an open file
// modes: pidns ns
#include "zoo.h"
#include <sys/mount.h>

int main(void)
{
	const char *dirs[] = { "tree", "tree/lower", "tree/upper", "tree/work", "merged" };
	char here[1024], options[4096];
	int fd;

	CHECK(getcwd(here, sizeof here));
	snprintf(options, sizeof options, "lowerdir=%s/tree/lower,upperdir=%s/tree/upper,workdir=%s/tree/work", here,
		 here, here);
	for (int i = 0; i < 5; i++) {
		TRY(mkdir(dirs[i], 0755));
		if (i == 0)
			TRY(mount("tmpfs", "tree", "tmpfs", 0, ""));
	}
	close(TRY(open("tree/lower/kept", O_CREAT | O_RDWR, 0600)));
	close(TRY(open("tree/lower/removed", O_CREAT | O_RDWR, 0600)));
	if (mount("overlay", "merged", "overlay", 0, options))
		zoo_skip("no overlay on tmpfs");
	TRY(unlink("merged/removed"));
	fd = TRY(open("merged/kept", O_RDWR));
	CHECK_EQ(write(fd, "text", 4), 4);
	zoo_ready();
	zoo_wait();
	CHECK(strcmp(zoo_slurp("merged/kept"), "text") == 0);
	CHECK(access("merged/removed", F_OK) < 0);
	CHECK_EQ(write(fd, "more", 4), 4);
	zoo_pass();
}
