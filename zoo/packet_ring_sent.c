// area: packet and netlink sockets
// shows: a packet socket's ring for sending that has been used is refused
// expect: refused "PACKET_TX_RING"
// modes: plain leave-running pidns ns userns
#include "packet.h"

int main(void)
{
	struct ring ring = ring_open(TPACKET_V2, 8, true);
	struct tpacket2_hdr *out = (void *)(ring.memory + 8 * FRAME);

	packet_make((unsigned char *)out + TPACKET_ALIGN(sizeof *out), 1);
	out->tp_len = 64;
	out->tp_status = TP_STATUS_SEND_REQUEST;
	if (send(ring.fd, NULL, 0, 0) < 0)
		zoo_skip("the loopback device is down");
	zoo_ready();
	zoo_wait();
	zoo_pass();
}
