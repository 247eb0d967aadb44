// area: UDP and raw sockets
// shows: a corked UDP socket with data that was not sent is refused
// expect: refused "cork"
#include "zoo.h"
#include "tcp.h"
#include <netinet/udp.h>

int main(void)
{
	union tcp_name name;
	int fd = TRY(socket(AF_INET, SOCK_DGRAM, 0));
	socklen_t len = tcp_loopback(&name, AF_INET, 0);
	char text[16];

	TRY(bind(fd, &name.any, len));
	TRY(getsockname(fd, &name.any, &len));
	TRY(connect(fd, &name.any, len));
	sock_set(fd, IPPROTO_UDP, UDP_CORK, 1);
	CHECK_EQ(send(fd, "corked", 6, 0), 6);
	zoo_ready();
	zoo_wait();
	sock_set(fd, IPPROTO_UDP, UDP_CORK, 0);
	CHECK_EQ(recv(fd, text, 16, 0), 6);
	zoo_pass();
}
