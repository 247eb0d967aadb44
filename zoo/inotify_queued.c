// area: event descriptors
// shows: inotify events that are queued and not yet read come back as an overflow, which tells the program to look anew
// foreign: no CRIU's images do not say that events were queued
#include "zoo.h"
#include <sys/inotify.h>

int main(void)
{
	int fd = TRY(inotify_init1(IN_NONBLOCK)), wd;
	char buffer[4096] __attribute__((aligned(8)));
	struct inotify_event *ev = (void *)buffer;

	TRY(mkdir("dir", 0755));
	wd = TRY(inotify_add_watch(fd, "dir", IN_CREATE));
	TRY(mkdir("dir/one", 0755));
	TRY(mkdir("dir/two", 0755));
	zoo_ready();
	zoo_wait();
	CHECK(read(fd, buffer, sizeof buffer) > 0);
	if (ev->mask == IN_Q_OVERFLOW) {
		CHECK_EQ(ev->wd, -1);
		CHECK(read(fd, buffer, sizeof buffer) < 0 && errno == EAGAIN);
		TRY(mkdir("dir/three", 0755));
		CHECK(read(fd, buffer, sizeof buffer) > 0);
		CHECK_EQ(ev->wd, wd);
		CHECK(strcmp(ev->name, "three") == 0);
		zoo_pass();
	}
	/* Never restored. */
	CHECK_EQ(ev->mask, IN_CREATE | IN_ISDIR);
	CHECK(strcmp(ev->name, "one") == 0);
	ev = (void *)((char *)(ev + 1) + ev->len);
	CHECK(strcmp(ev->name, "two") == 0);
	zoo_pass();
}
