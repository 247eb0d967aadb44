// area: event descriptors
// shows: fanotify events that nobody has read come back as an overflow, for descriptors that name files and those that bring them
// modes: plain leave-running pidns ns
// foreign: no CRIU's images do not say that events were queued
#include "zoo.h"
#include <sys/fanotify.h>

#ifndef FAN_REPORT_FID
#define FAN_REPORT_FID 0x200
#endif

static void check(int fd, int file, bool names)
{
	char buffer[4096] __attribute__((aligned(8)));
	struct fanotify_event_metadata *ev = (void *)buffer;

	CHECK(read(fd, buffer, sizeof buffer) >= (ssize_t)sizeof *ev);
	if (ev->mask == FAN_Q_OVERFLOW) {
		CHECK_EQ(ev->fd, FAN_NOFD);
	} else {
		/* Never restored. */
		CHECK_EQ(ev->mask, FAN_MODIFY);
		CHECK_EQ(ev->fd == FAN_NOFD, names);
	}
	CHECK(read(fd, buffer, sizeof buffer) < 0 && errno == EAGAIN);
	CHECK_EQ(write(file, "x", 1), 1);
	CHECK(read(fd, buffer, sizeof buffer) >= (ssize_t)sizeof *ev);
	CHECK_EQ(ev->mask, FAN_MODIFY);
}

int main(void)
{
	int files = fanotify_init(FAN_CLASS_NOTIF | FAN_NONBLOCK, O_RDONLY);
	int names = fanotify_init(FAN_CLASS_NOTIF | FAN_NONBLOCK | FAN_REPORT_FID, O_RDONLY);
	int file;

	if (files < 0 || names < 0)
		zoo_skip("no fanotify");
	file = TRY(open("file", O_RDWR | O_CREAT, 0600));
	TRY(fanotify_mark(files, FAN_MARK_ADD, FAN_MODIFY, AT_FDCWD, "file"));
	if (fanotify_mark(names, FAN_MARK_ADD, FAN_MODIFY, AT_FDCWD, "file") < 0)
		zoo_skip("no file handles here");
	CHECK_EQ(write(file, "x", 1), 1);
	zoo_ready();
	zoo_wait();
	check(files, file, false);
	check(names, file, true);
	zoo_pass();
}
