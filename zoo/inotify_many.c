// area: event descriptors
// shows: 64 inotify watches
// foreign: yes
#include "zoo.h"
#include <sys/inotify.h>

int main(void)
{
	int fd = TRY(inotify_init1(IN_NONBLOCK)), wds[64];
	char buffer[4096] __attribute__((aligned(8))), name[32];

	for (int i = 0; i < 64; i++) {
		snprintf(name, sizeof name, "dir%d", i);
		TRY(mkdir(name, 0755));
		wds[i] = TRY(inotify_add_watch(fd, name, IN_CREATE));
	}
	zoo_ready();
	zoo_wait();
	for (int i = 63; i >= 0; i--) {
		struct inotify_event *ev = (void *)buffer;

		snprintf(name, sizeof name, "dir%d/new", i);
		TRY(mkdir(name, 0755));
		CHECK(read(fd, buffer, sizeof buffer) > 0);
		CHECK_EQ(ev->wd, wds[i]);
	}
	zoo_pass();
}
