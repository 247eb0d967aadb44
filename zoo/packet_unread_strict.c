// area: packet and netlink sockets
// shows: --strict: packets that a packet socket has received, and nobody has read, are refused
// dump: --strict
// expect: refused "not read yet"
// modes: plain pidns ns userns
#include "packet.h"

int main(void)
{
	struct sockaddr_ll name = packet_name();
	int fd = TRY(socket(AF_PACKET, SOCK_RAW, 0));
	unsigned char frame[64];

	TRY(bind(fd, (void *)&name, sizeof name));
	packet_send(1);
	WAIT_UNTIL(recv(fd, frame, sizeof frame, MSG_PEEK | MSG_DONTWAIT) == sizeof frame);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(recv(fd, frame, sizeof frame, 0), sizeof frame);
	zoo_pass();
}
