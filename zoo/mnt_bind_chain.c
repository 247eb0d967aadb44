// area: mounts
// shows: binds of a place that is then hidden by another mount
// modes: pidns ns userns
#include "zoo.h"
#include <sys/mount.h>

int main(void)
{
	TRY(mkdir("source", 0755));
	TRY(mkdir("target", 0755));
	TRY(mount("tmpfs", "source", "tmpfs", 0, ""));
	TRY(mkdir("source/sub", 0755));
	close(TRY(open("source/sub/first", O_CREAT | O_RDWR, 0600)));
	TRY(mount("source/sub", "target", NULL, MS_BIND, NULL));
	TRY(mount("tmpfs", "source", "tmpfs", 0, ""));
	close(TRY(open("source/second", O_CREAT | O_RDWR, 0600)));
	zoo_ready();
	zoo_wait();
	TRY(access("target/first", F_OK));
	TRY(access("source/second", F_OK));
	close(TRY(open("target/third", O_CREAT | O_RDWR, 0600)));
	TRY(umount("source"));
	TRY(access("source/sub/third", F_OK));
	zoo_pass();
}
