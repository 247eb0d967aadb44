// area: UDP and raw sockets
// shows: datagrams that are received and not yet read: the socket stays usable (the network may lose them)
#include "zoo.h"
#include "tcp.h"

int main(void)
{
	union tcp_name name;
	int fd = TRY(socket(AF_INET, SOCK_DGRAM, 0));
	socklen_t len = tcp_loopback(&name, AF_INET, 0);
	char text[16];

	TRY(bind(fd, &name.any, len));
	TRY(getsockname(fd, &name.any, &len));
	CHECK_EQ(sendto(fd, "early", 5, 0, &name.any, len), 5);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(sendto(fd, "later!", 6, 0, &name.any, len), 6);
	while (recv(fd, text, 16, 0) != 6)
		;
	zoo_pass();
}
