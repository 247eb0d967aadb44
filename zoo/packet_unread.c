// area: packet and netlink sockets
// shows: packets that a packet socket has received, and nobody has read, are left out with a warning; the next one comes
// modes: plain leave-running pidns ns userns
// foreign: yes
#include "packet.h"

int main(void)
{
	struct sockaddr_ll name = packet_name();
	int number = 0, fd = TRY(socket(AF_PACKET, SOCK_RAW, 0));
	unsigned char frame[64];

	TRY(bind(fd, (void *)&name, sizeof name));
	packet_send(1);
	WAIT_UNTIL(recv(fd, frame, sizeof frame, MSG_PEEK | MSG_DONTWAIT) == sizeof frame);
	zoo_ready();
	zoo_wait();
	packet_send(2);
	/* Without a restore the first is still there. */
	while (number != 2) {
		CHECK_EQ(recv(fd, frame, sizeof frame, 0), sizeof frame);
		memcpy(&number, frame + 14, sizeof number);
	}
	zoo_pass();
}
