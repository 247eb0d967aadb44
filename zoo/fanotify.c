// area: event descriptors
// shows: fanotify marks on a file and on a mount
// foreign: yes
// modes: plain leave-running pidns ns
#include "zoo.h"
#include <sys/fanotify.h>

int main(void)
{
	int fd = fanotify_init(FAN_CLASS_NOTIF | FAN_NONBLOCK, O_RDONLY), file;
	struct fanotify_event_metadata ev;

	if (fd < 0)
		zoo_skip("no fanotify");
	file = TRY(open("file", O_RDWR | O_CREAT, 0600));
	TRY(fanotify_mark(fd, FAN_MARK_ADD, FAN_MODIFY, AT_FDCWD, "file"));
	zoo_ready();
	zoo_wait();
	CHECK(read(fd, &ev, sizeof ev) < 0 && errno == EAGAIN);
	CHECK_EQ(write(file, "x", 1), 1);
	CHECK(read(fd, &ev, sizeof ev) >= (ssize_t)sizeof ev);
	CHECK_EQ(ev.mask, FAN_MODIFY);
	zoo_pass();
}
