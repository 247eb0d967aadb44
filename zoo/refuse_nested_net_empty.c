// area: refusals
// shows: a network device below the container's network, which nobody would make again where networks are
//   left empty, is refused
// modes: ns
// options: --empty-ns net
// expect: refused "nobody would make it again"
#include "zoo.h"
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

int main(void)
{
	pid_t child = TRY(fork());

	if (!child) {
		int fd;

		TRY(unshare(CLONE_NEWNET));
		fd = TRY(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
		TRY(ioctl(fd, SIOCBRADDBR, "zoo0"));
		TRY(close(fd));
		zoo_tell("apart");
		zoo_wait();
		_exit(3);
	}
	zoo_await("apart");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 3);
	zoo_pass();
}
