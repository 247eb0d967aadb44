// area: mounts
// shows: overlay mounts with a changed, a removed and an open file; one lies deeper than its layers, and is hidden
// modes: pidns ns
#include "zoo.h"
#include <sys/mount.h>

/* Mounts an overlay of the lower directory, with a name for the other two. */
static int overlay(const char *name, const char *place)
{
	char here[1024], options[4096];

	CHECK(getcwd(here, sizeof here));
	snprintf(options, sizeof options, "lowerdir=%s/tree/lower,upperdir=%s/tree/upper-%s,workdir=%s/tree/work-%s",
		 here, here, name, here, name);
	return mount("overlay", place, "overlay", 0, options);
}

int main(void)
{
	const char *dirs[] = { "tree", "tree/lower", "tree/upper-a", "tree/work-a", "tree/upper-b", "tree/work-b",
			       "merged", "above", "above/merged" };
	int fd, hidden;

	for (int i = 0; i < 9; i++) {
		TRY(mkdir(dirs[i], 0755));
		if (i == 0)
			TRY(mount("tmpfs", "tree", "tmpfs", 0, ""));
	}
	close(TRY(open("tree/lower/kept", O_CREAT | O_RDWR, 0600)));
	close(TRY(open("tree/lower/removed", O_CREAT | O_RDWR, 0600)));
	if (overlay("a", "merged"))
		zoo_skip("no overlay on tmpfs");
	TRY(unlink("merged/removed"));
	fd = TRY(open("merged/kept", O_RDWR));
	CHECK_EQ(write(fd, "text", 4), 4);
	TRY(overlay("b", "above/merged"));
	hidden = TRY(open("above/merged/kept", O_RDWR));
	CHECK_EQ(write(hidden, "else", 4), 4);
	TRY(close(hidden));
	TRY(mount("tmpfs", "above", "tmpfs", 0, ""));
	zoo_ready();
	zoo_wait();
	CHECK(strcmp(zoo_slurp("merged/kept"), "text") == 0);
	CHECK(access("merged/removed", F_OK) < 0);
	CHECK_EQ(write(fd, "more", 4), 4);
	CHECK(access("above/merged", F_OK) < 0);
	TRY(umount("above"));
	CHECK(strcmp(zoo_slurp("above/merged/kept"), "else") == 0);
	zoo_pass();
}
