// area: unlinked files
// shows: a file opened by a name that was removed, while another name remains
// foreign: yes
// warns: torpor image discard
// options: --link-remap
// modes: -leave-running
#include "zoo.h"

/* The name that the dump gives is taken back when the tasks go on: there is nothing to restore from then. */
int main(void)
{
	int fd = TRY(open("one", O_RDWR | O_CREAT, 0600));
	struct stat opened, named;

	TRY(link("one", "two"));
	TRY(unlink("one"));
	zoo_ready();
	zoo_wait();
	TRY(fstat(fd, &opened));
	TRY(stat("two", &named));
	CHECK_EQ(opened.st_ino, named.st_ino);
	CHECK_EQ(opened.st_nlink, 1);
	CHECK(access("one", F_OK) < 0);
	zoo_pass();
}
