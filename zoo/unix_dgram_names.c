// area: Unix sockets
// shows: datagram sockets bound by path: unconnected, two clients, one connected to itself
// foreign: no CRIU's images have paths of sockets that are open under them
#include "zoo.h"
#include <sys/socket.h>
#include <sys/un.h>

int main(void)
{
	struct sockaddr_un names[4], from;
	int fds[4];
	socklen_t len;
	char text[16];

	for (int i = 0; i < 4; i++) {
		names[i] = (struct sockaddr_un){ AF_UNIX, "dgram0" };
		names[i].sun_path[5] = (char)('0' + i);
		fds[i] = TRY(socket(AF_UNIX, SOCK_DGRAM, 0));
		TRY(bind(fds[i], (void *)&names[i], sizeof names[i]));
	}
	TRY(connect(fds[1], (void *)&names[0], sizeof names[0]));
	TRY(connect(fds[2], (void *)&names[0], sizeof names[0]));
	TRY(connect(fds[3], (void *)&names[3], sizeof names[3]));
	CHECK_EQ(write(fds[1], "one", 3), 3);
	CHECK_EQ(write(fds[2], "three", 5), 5);
	CHECK_EQ(write(fds[3], "myself", 6), 6);
	zoo_ready();
	zoo_wait();
	for (int i = 1; i < 3; i++) {
		len = sizeof from;
		CHECK_EQ(recvfrom(fds[0], text, sizeof text, 0, (void *)&from, &len), i * 2 + 1);
		CHECK(strcmp(from.sun_path, names[i].sun_path) == 0);
	}
	CHECK_EQ(read(fds[3], text, sizeof text), 6);
	CHECK(memcmp(text, "myself", 6) == 0);
	CHECK_EQ(write(fds[2], "more", 4), 4);
	CHECK_EQ(read(fds[0], text, sizeof text), 4);
	/* A socket that is connected hears nobody else. */
	CHECK_EQ(sendto(fds[0], "back", 4, 0, (void *)&names[2], sizeof names[2]), 4);
	CHECK_EQ(read(fds[2], text, sizeof text), 4);
	CHECK(sendto(fds[3], "x", 1, 0, (void *)&names[2], sizeof names[2]) < 0 && errno == EPERM);
	len = sizeof from;
	TRY(getpeername(fds[1], (void *)&from, &len));
	CHECK(strcmp(from.sun_path, "dgram0") == 0);
	CHECK(recv(fds[0], text, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN);
	zoo_pass();
}
