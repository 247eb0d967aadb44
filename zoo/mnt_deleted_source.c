// area: mounts
// shows: bind mounts whose source was removed
// modes: pidns ns userns
#include "zoo.h"
#include <sys/mount.h>

int main(void)
{
	struct stat st;

	TRY(mkdir("from", 0755));
	TRY(mkdir("to", 0755));
	close(TRY(open("from-file", O_CREAT | O_RDWR, 0600)));
	close(TRY(open("to-file", O_CREAT | O_RDWR, 0600)));
	TRY(mount("from", "to", NULL, MS_BIND, NULL));
	TRY(mount("from-file", "to-file", NULL, MS_BIND, NULL));
	TRY(rmdir("from"));
	TRY(unlink("from-file"));
	zoo_ready();
	zoo_wait();
	TRY(stat("to", &st));
	CHECK_EQ(st.st_nlink, 0);
	TRY(stat("to-file", &st));
	CHECK_EQ(st.st_nlink, 0);
	TRY(umount("to"));
	TRY(umount("to-file"));
	zoo_pass();
}
