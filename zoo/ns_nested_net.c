// area: network namespaces
// shows: three network namespaces in a tree; abstract names are apart; a socket of one in a task of another
// modes: ns userns
#include "zoo.h"
#include <stddef.h>
#include <sys/socket.h>
#include <sys/un.h>

static const struct sockaddr_un name = { AF_UNIX, "\0zoo-nested" };
#define LEN (offsetof(struct sockaddr_un, sun_path) + 11)

int main(void)
{
	int fds[3];
	pid_t pids[2];

	fds[0] = TRY(socket(AF_UNIX, SOCK_DGRAM, 0));
	TRY(bind(fds[0], (void *)&name, LEN));
	for (int i = 0; i < 2; i++)
		if (!(pids[i] = TRY(fork()))) {
			int fd;

			TRY(unshare(CLONE_NEWNET));
			fd = TRY(socket(AF_UNIX, SOCK_DGRAM, 0));
			TRY(bind(fd, (void *)&name, LEN));
			zoo_tell(i ? "one" : "two");
			zoo_wait();
			CHECK_EQ(sendto(fd, "x", 1, 0, (void *)&name, LEN), 1);
			CHECK(recv(fd, fds, 1, 0) == 1);
			CHECK(recv(fds[0], fds, 1, MSG_DONTWAIT) < 0);
			_exit(0);
		}
	zoo_await("one");
	zoo_await("two");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(pids[0], 0);
	CHECK_EXIT(pids[1], 0);
	zoo_pass();
}
