// area: packet and netlink sockets
// shows: a packet socket's ring that is mapped is refused
// expect: refused "mapped packet socket rings"
// modes: plain leave-running pidns ns
#include "zoo.h"
#include "tcp.h"
#include <linux/if_packet.h>
#include <net/ethernet.h>

int main(void)
{
	struct tpacket_req ring = { .tp_block_size = 4096, .tp_block_nr = 4, .tp_frame_size = 2048, .tp_frame_nr = 8 };
	int fd = TRY(socket(AF_PACKET, SOCK_RAW, htons(ETH_P_ALL))), udp = TRY(socket(AF_INET, SOCK_DGRAM, 0));
	volatile struct tpacket_hdr *frames;
	union tcp_name name;
	socklen_t len = tcp_loopback(&name, AF_INET, 9);

	TRY(setsockopt(fd, SOL_PACKET, PACKET_RX_RING, &ring, sizeof ring));
	frames = zoo_map(4 * 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(sendto(udp, "x", 1, 0, &name.any, len), 1);
	WAIT_UNTIL(frames[0].tp_status & TP_STATUS_USER);
	zoo_pass();
}
