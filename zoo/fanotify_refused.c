// area: event descriptors
// shows: a fanotify descriptor that decides about what others access is refused
// expect: refused "decides"
// modes: plain pidns ns
#include "zoo.h"
#include <sys/fanotify.h>

int main(void)
{
	int fd = fanotify_init(FAN_CLASS_CONTENT | FAN_NONBLOCK, O_RDONLY);

	if (fd < 0)
		zoo_skip("no fanotify");
	zoo_ready();
	zoo_wait();
	TRY(fcntl(fd, F_GETFD));
	zoo_pass();
}
