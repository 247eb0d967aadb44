// area: event descriptors
// shows: inotify: watches on a directory and on files, their numbers and masks; no stray events
// foreign: yes
#include "zoo.h"
#include <sys/inotify.h>

static char buffer[4096] __attribute__((aligned(8)));

static struct inotify_event *next(int fd)
{
	CHECK(read(fd, buffer, sizeof buffer) > 0);
	return (struct inotify_event *)buffer;
}

int main(void)
{
	int fd = TRY(inotify_init1(IN_NONBLOCK | IN_CLOEXEC)), second = TRY(inotify_init1(IN_NONBLOCK)), file;
	int gone, dir, other;
	struct inotify_event *ev;

	TRY(mkdir("watched", 0755));
	file = TRY(open("watched/file", O_RDWR | O_CREAT, 0600));
	gone = TRY(inotify_add_watch(fd, "watched/file", IN_MODIFY));
	TRY(inotify_rm_watch(fd, gone));
	CHECK(read(fd, buffer, sizeof buffer) > 0);
	dir = TRY(inotify_add_watch(fd, "watched", IN_CREATE | IN_DELETE | IN_MOVED_TO));
	other = TRY(inotify_add_watch(second, "watched/file", IN_MODIFY | IN_ATTRIB));
	zoo_ready();
	zoo_wait();
	CHECK(read(fd, buffer, sizeof buffer) < 0 && errno == EAGAIN);
	CHECK(read(second, buffer, sizeof buffer) < 0 && errno == EAGAIN);
	close(TRY(open("watched/new", O_RDWR | O_CREAT, 0600)));
	ev = next(fd);
	CHECK_EQ(ev->wd, dir);
	CHECK_EQ(ev->mask, IN_CREATE);
	CHECK(strcmp(ev->name, "new") == 0);
	CHECK_EQ(write(file, "x", 1), 1);
	ev = next(second);
	CHECK_EQ(ev->wd, other);
	CHECK_EQ(ev->mask, IN_MODIFY);
	CHECK(inotify_rm_watch(fd, gone) < 0);
	zoo_pass();
}
