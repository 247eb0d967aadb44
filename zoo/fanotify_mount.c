// area: event descriptors
// shows: fanotify: a mark on a mount, and one on a file in it that is to be ignored
// modes: ns
#include "zoo.h"
#include <sys/fanotify.h>

static int touch(const char *path)
{
	int fd = TRY(open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600));

	CHECK_EQ(write(fd, "x", 1), 1);
	return fd;
}

int main(void)
{
	int fd = fanotify_init(FAN_CLASS_NOTIF | FAN_NONBLOCK | FAN_CLOEXEC, O_RDONLY | O_CLOEXEC), file;
	struct fanotify_event_metadata ev;

	if (fd < 0)
		zoo_skip("no fanotify");
	close(touch("/dev/shm/ignored"));
	/* A mount where nobody else writes: elsewhere it is that of all programs. */
	TRY(fanotify_mark(fd, FAN_MARK_ADD | FAN_MARK_MOUNT, FAN_MODIFY, AT_FDCWD, "/dev/shm"));
	TRY(fanotify_mark(fd, FAN_MARK_ADD | FAN_MARK_IGNORED_MASK | FAN_MARK_IGNORED_SURV_MODIFY, FAN_MODIFY,
			  AT_FDCWD, "/dev/shm/ignored"));
	zoo_ready();
	zoo_wait();
	close(touch("/dev/shm/ignored"));
	CHECK(read(fd, &ev, sizeof ev) < 0 && errno == EAGAIN);
	file = touch("/dev/shm/other");
	CHECK_EQ(read(fd, &ev, sizeof ev), sizeof ev);
	CHECK_EQ(ev.mask, FAN_MODIFY);
	close(file);
	TRY(unlink("/dev/shm/ignored"));
	TRY(unlink("/dev/shm/other"));
	zoo_pass();
}
