// area: mounts
// shows: a nested mount namespace that has moved to a tmpfs as its root
// modes: pidns ns userns
#include "zoo.h"
#include <sys/mount.h>

int main(void)
{
	int ends[2], moved[2];
	pid_t child;
	char c;

	TRY(mkdir("root", 0755));
	TRY(pipe(ends));
	TRY(pipe(moved));
	child = TRY(fork());
	if (child == 0) {
		TRY(close(moved[0]));
		TRY(unshare(CLONE_NEWNS));
		TRY(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL));
		TRY(mount("tmpfs", "root", "tmpfs", 0, "mode=0755"));
		TRY(chdir("root"));
		TRY(mkdir("inside", 0755));
		TRY(syscall(SYS_pivot_root, ".", "."));
		TRY(umount2(".", MNT_DETACH));
		TRY(chdir("/"));
		/* The parent's files are out of reach here. */
		TRY(close(moved[1]));
		while (read(ends[0], &c, 1) != 1)
			;
		CHECK(access("/inside", F_OK) == 0 && access("/work", F_OK) < 0);
		_exit(3);
	}
	TRY(close(moved[1]));
	CHECK_EQ(read(moved[0], &c, 1), 0);
	TRY(close(moved[0]));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(write(ends[1], "x", 1), 1);
	CHECK_EXIT(child, 3);
	zoo_pass();
}
