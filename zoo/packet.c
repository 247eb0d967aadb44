// area: packet and netlink sockets
// shows: packet sockets: binding, version, reserve, auxiliary data, fanout, memberships, rings
// foreign: yes
// modes: plain leave-running pidns ns userns
#include "zoo.h"
#include "tcp.h"
#include <linux/if_packet.h>
#include <net/ethernet.h>

int main(void)
{
	struct sockaddr_ll name = { .sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_IP), .sll_ifindex = 1 }, got;
	struct tpacket_req ring = { .tp_block_size = 4096, .tp_block_nr = 4, .tp_frame_size = 2048, .tp_frame_nr = 8 };
	int raw = TRY(socket(AF_PACKET, SOCK_RAW, 0)), dgram = TRY(socket(AF_PACKET, SOCK_DGRAM, htons(ETH_P_ALL)));
	int ringed = TRY(socket(AF_PACKET, SOCK_RAW, 0)), fanned = TRY(socket(AF_PACKET, SOCK_RAW, htons(ETH_P_IP)));
	socklen_t len = sizeof got;

	TRY(bind(raw, (void *)&name, sizeof name));
	sock_set(raw, SOL_PACKET, PACKET_AUXDATA, 1);
	sock_set(raw, SOL_PACKET, PACKET_ORIGDEV, 1);
	sock_set(ringed, SOL_PACKET, PACKET_VERSION, TPACKET_V2);
	sock_set(ringed, SOL_PACKET, PACKET_RESERVE, 4);
	TRY(setsockopt(ringed, SOL_PACKET, PACKET_RX_RING, &ring, sizeof ring));
	sock_set(fanned, SOL_PACKET, PACKET_FANOUT, 13 | PACKET_FANOUT_HASH << 16);
	zoo_ready();
	zoo_wait();
	TRY(getsockname(raw, (void *)&got, &len));
	CHECK_EQ(got.sll_ifindex, 1);
	CHECK_EQ(got.sll_protocol, htons(ETH_P_IP));
	CHECK_EQ(sock_option(raw, SOL_PACKET, PACKET_AUXDATA), 1);
	CHECK_EQ(sock_option(raw, SOL_PACKET, PACKET_ORIGDEV), 1);
	CHECK_EQ(sock_option(ringed, SOL_PACKET, PACKET_VERSION), TPACKET_V2);
	CHECK_EQ(sock_option(ringed, SOL_PACKET, PACKET_RESERVE), 4);

	CHECK_EQ(sock_option(fanned, SOL_PACKET, PACKET_FANOUT), 13 | PACKET_FANOUT_HASH << 16);
	CHECK_EQ(sock_option(dgram, SOL_SOCKET, SO_TYPE), SOCK_DGRAM);
	zoo_pass();
}
