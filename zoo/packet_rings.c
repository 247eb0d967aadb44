// area: packet and netlink sockets
// shows: mapped rings of packet sockets, of all three versions: where program and kernel stand in them, unread packets, a ring for sending
// modes: plain leave-running pidns ns userns
// foreign: no CRIU keeps no packets in rings
#include "packet.h"

#define SLOTS 8

int main(void)
{
	struct ring rings[3], pair = ring_open(TPACKET_V2, SLOTS, true);
	struct tpacket2_hdr *out;
	int sent = 0;

	for (int version = TPACKET_V1; version <= TPACKET_V3; version++)
		rings[version] = ring_open(version, SLOTS, false);
	/* Each once around and some, and at different places. */
	for (int i = 0; i < 11; i++, sent++) {
		packet_send(sent);
		CHECK_EQ(ring_read(&pair), sent);
		for (int version = TPACKET_V1; version <= TPACKET_V3; version++)
			CHECK_EQ(ring_read(&rings[version]), sent);
	}
	for (int i = 0; i < 3; i++, sent++)
		packet_send(sent);
	for (int i = 0; i < 3; i++)
		CHECK_EQ(ring_read(&pair), sent - 3 + i);
	/* What was received last is in blocks that are complete. */
	WAIT_UNTIL(ring_unread(&rings[TPACKET_V3]) == 3);
	zoo_ready();
	zoo_wait();
	for (int version = TPACKET_V1; version <= TPACKET_V3; version++)
		for (int i = 0; i < 3; i++)
			CHECK_EQ(ring_read(&rings[version]), sent - 3 + i);
	for (int i = 0; i < 20; i++, sent++) {
		packet_send(sent);
		CHECK_EQ(ring_read(&pair), sent);
		for (int version = TPACKET_V1; version <= TPACKET_V3; version++)
			CHECK_EQ(ring_read(&rings[version]), sent);
	}
	out = (void *)(pair.memory + SLOTS * FRAME);
	packet_make((unsigned char *)out + TPACKET_ALIGN(sizeof *out), sent);
	out->tp_len = 64;
	*(volatile uint32_t *)&out->tp_status = TP_STATUS_SEND_REQUEST;
	CHECK_EQ(send(pair.fd, NULL, 0, 0), 64);
	for (int version = TPACKET_V1; version <= TPACKET_V3; version++)
		CHECK_EQ(ring_read(&rings[version]), sent);
	zoo_pass();
}
