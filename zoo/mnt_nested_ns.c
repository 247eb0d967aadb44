// area: mounts
// shows: a mount namespace of its own inside of the tree, with its own tmpfs and an unlinked file on it
// modes: pidns ns userns
#include "zoo.h"
#include <sys/mount.h>

int main(void)
{
	pid_t child;

	TRY(mkdir("own", 0755));
	child = TRY(fork());
	if (child == 0) {
		char text[4];
		int fd;

		TRY(unshare(CLONE_NEWNS));
		TRY(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL));
		TRY(mount("tmpfs", "own", "tmpfs", 0, ""));
		close(TRY(open("own/marker", O_CREAT | O_RDWR, 0600)));
		fd = TRY(open("own/ghost", O_CREAT | O_RDWR, 0600));
		CHECK_EQ(write(fd, "boo!", 4), 4);
		TRY(unlink("own/ghost"));
		zoo_tell("child");
		zoo_wait();
		TRY(access("own/marker", F_OK));
		CHECK_EQ(pread(fd, text, 4, 0), 4);
		CHECK(memcmp(text, "boo!", 4) == 0);
		TRY(mount("tmpfs", "own", "tmpfs", 0, ""));
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK(access("own/marker", F_OK) < 0);
	CHECK_EXIT(child, 0);
	zoo_pass();
}
