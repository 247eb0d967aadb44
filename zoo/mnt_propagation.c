// area: mounts
// shows: shared, slave, private and slave-shared mounts: later mounts reach whom they should
// modes: pidns ns userns
#include "zoo.h"
#include <sys/mount.h>

static void bind_as(const char *from, const char *to, unsigned long kind)
{
	TRY(mkdir(to, 0755));
	TRY(mount(from, to, NULL, MS_BIND, NULL));
	if (kind)
		TRY(mount(NULL, to, NULL, kind, NULL));
}

static bool mounted(const char *dir)
{
	char path[64];

	snprintf(path, sizeof path, "%s/sub/marker", dir);
	return access(path, F_OK) == 0;
}

int main(void)
{
	const char *dirs[] = { "shared", "peer", "slave", "private", "slave-shared" };

	TRY(mkdir("shared", 0755));
	TRY(mount("tmpfs", "shared", "tmpfs", 0, ""));
	TRY(mkdir("shared/sub", 0755));
	TRY(mount(NULL, "shared", NULL, MS_SHARED, NULL));
	bind_as("shared", "peer", 0);
	bind_as("shared", "slave", MS_SLAVE);
	bind_as("shared", "private", MS_PRIVATE);
	bind_as("shared", "slave-shared", MS_SLAVE);
	TRY(mount(NULL, "slave-shared", NULL, MS_SHARED, NULL));
	bind_as("slave-shared", "below", 0);
	zoo_ready();
	zoo_wait();
	TRY(mount("tmpfs", "peer/sub", "tmpfs", 0, ""));
	close(TRY(open("peer/sub/marker", O_CREAT | O_RDWR, 0600)));
	for (int i = 0; i < 5; i++)
		CHECK_EQ(mounted(dirs[i]), i != 3);
	CHECK(mounted("below"));
	/* What is mounted on a slave stays there. */
	TRY(umount("slave/sub"));
	CHECK(mounted("shared") && !mounted("slave"));
	TRY(umount("slave-shared/sub"));
	CHECK(mounted("shared") && !mounted("below"));
	zoo_pass();
}
