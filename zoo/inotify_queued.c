// area: event descriptors
// shows: inotify events that are queued and not yet read
#include "zoo.h"
#include <sys/inotify.h>

int main(void)
{
	int fd = TRY(inotify_init1(IN_NONBLOCK));
	char buffer[4096] __attribute__((aligned(8)));
	struct inotify_event *ev = (void *)buffer;

	TRY(mkdir("dir", 0755));
	TRY(inotify_add_watch(fd, "dir", IN_CREATE));
	TRY(mkdir("dir/one", 0755));
	TRY(mkdir("dir/two", 0755));
	zoo_ready();
	zoo_wait();
	CHECK(read(fd, buffer, sizeof buffer) > 0);
	CHECK_EQ(ev->mask, IN_CREATE | IN_ISDIR);
	CHECK(strcmp(ev->name, "one") == 0);
	ev = (void *)((char *)(ev + 1) + ev->len);
	CHECK(strcmp(ev->name, "two") == 0);
	zoo_pass();
}
