// area: Unix sockets
// shows: options of Unix sockets: buffer sizes, SO_PASSCRED, SO_RCVTIMEO, credentials of the peer
// foreign: yes
#include "zoo.h"
#include <sys/socket.h>
#include <sys/time.h>

static int option(int fd, int name)
{
	int value;
	socklen_t len = sizeof value;

	TRY(getsockopt(fd, SOL_SOCKET, name, &value, &len));
	return value;
}

int main(void)
{
	int pair[2], one = 1, size = 30000, sndbuf, rcvbuf;
	struct timeval timeout = { 3, 500000 }, got;
	struct ucred before, after;
	socklen_t len = sizeof before;

	TRY(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
	TRY(setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &size, sizeof size));
	TRY(setsockopt(pair[0], SOL_SOCKET, SO_RCVBUF, &size, sizeof size));
	TRY(setsockopt(pair[0], SOL_SOCKET, SO_PASSCRED, &one, sizeof one));
	TRY(setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout));
	sndbuf = option(pair[0], SO_SNDBUF);
	rcvbuf = option(pair[0], SO_RCVBUF);
	TRY(getsockopt(pair[1], SOL_SOCKET, SO_PEERCRED, &before, &len));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(option(pair[0], SO_SNDBUF), sndbuf);
	CHECK_EQ(option(pair[0], SO_RCVBUF), rcvbuf);
	CHECK_EQ(option(pair[0], SO_PASSCRED), 1);
	CHECK_EQ(option(pair[1], SO_PASSCRED), 0);
	len = sizeof got;
	TRY(getsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &got, &len));
	CHECK_EQ(got.tv_sec, 3);
	CHECK_EQ(got.tv_usec, 500000);
	len = sizeof after;
	TRY(getsockopt(pair[1], SOL_SOCKET, SO_PEERCRED, &after, &len));
	CHECK_EQ(after.pid, before.pid);
	CHECK_EQ(after.uid, before.uid);
	CHECK_EQ(after.gid, before.gid);
	zoo_pass();
}
