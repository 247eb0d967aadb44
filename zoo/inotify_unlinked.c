// area: event descriptors
// shows: an inotify watch on an open file that was unlinked
// foreign: yes
// options: --link-remap
#include "zoo.h"
#include <sys/inotify.h>

int main(void)
{
	int fd = TRY(inotify_init1(IN_NONBLOCK)), file = TRY(open("file", O_RDWR | O_CREAT, 0600)), wd;
	char buffer[4096] __attribute__((aligned(8)));
	struct inotify_event *ev = (void *)buffer;

	TRY(unlink("file"));
	snprintf(buffer, sizeof buffer, "/proc/self/fd/%d", file);
	wd = TRY(inotify_add_watch(fd, buffer, IN_MODIFY));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(write(file, "x", 1), 1);
	CHECK(read(fd, buffer, sizeof buffer) > 0);
	CHECK_EQ(ev->wd, wd);
	CHECK_EQ(ev->mask, IN_MODIFY);
	zoo_pass();
}
