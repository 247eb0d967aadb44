// area: Unix sockets
// shows: a queued message that carries its sender's credentials
// foreign: no CRIU's images do not have the ids of peers
#include "zoo.h"
#include <sys/socket.h>

int main(void)
{
	char text[8], control[CMSG_SPACE(sizeof(struct ucred))];
	struct iovec iov = { text, sizeof text };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
	struct cmsghdr *cmsg;
	int pair[2], one = 1;
	pid_t child;

	TRY(socketpair(AF_UNIX, SOCK_DGRAM, 0, pair));
	TRY(setsockopt(pair[0], SOL_SOCKET, SO_PASSCRED, &one, sizeof one));
	child = TRY(fork());
	if (child == 0) {
		CHECK_EQ(write(pair[1], "x", 1), 1);
		zoo_tell("child");
		zoo_wait();
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK_EQ(recvmsg(pair[0], &msg, 0), 1);
	cmsg = CMSG_FIRSTHDR(&msg);
	CHECK(cmsg && cmsg->cmsg_type == SCM_CREDENTIALS);
	CHECK_EQ(((struct ucred *)CMSG_DATA(cmsg))->pid, child);
	CHECK_EXIT(child, 0);
	zoo_pass();
}
