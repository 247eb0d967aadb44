// Frames over the loopback device, of a type that nobody else has, and rings that receive them.
#include "zoo.h"
#include "tcp.h"
#include <linux/if_packet.h>
#include <net/ethernet.h>

#define FRAME 2048

/* Cases run side by side, many of them at the loopback device of the host; their directories differ. */
static inline unsigned short packet_type(void)
{
	struct stat here;

	TRY(stat(".", &here));
	return (unsigned short)(0x9000 + here.st_ino % 0x6000);
}

static inline struct sockaddr_ll packet_name(void)
{
	return (struct sockaddr_ll){ .sll_family = AF_PACKET, .sll_protocol = htons(packet_type()), .sll_ifindex = 1 };
}

/* A frame with a number in it. */
static inline void packet_make(unsigned char *frame, int number)
{
	unsigned short type = htons(packet_type());

	memset(frame, 0, 64);
	memcpy(frame + 12, &type, sizeof type);
	memcpy(frame + 14, &number, sizeof number);
}

static inline void packet_send(int number)
{
	struct sockaddr_ll to = packet_name();
	unsigned char frame[64];
	int fd = TRY(socket(AF_PACKET, SOCK_RAW, 0));

	packet_make(frame, number);
	if (sendto(fd, frame, sizeof frame, 0, (void *)&to, sizeof to) < 0)
		zoo_skip("the loopback device is down");
	TRY(close(fd));
}

/* A socket with rings, all mapped together, that receives such frames. */
struct ring {
	int fd, version, slots;
	unsigned block;
	char *memory;
	int at;
	unsigned left, offset;
};

static inline struct ring ring_open(int version, int slots, bool sends)
{
	struct sockaddr_ll name = packet_name();
	struct ring ring = { TRY(socket(AF_PACKET, SOCK_RAW, 0)), version, slots, version == TPACKET_V3 ? 8192 : 4096, 0, 0, 0, 0 };
	struct tpacket_req3 req = { .tp_block_size = ring.block, .tp_frame_size = FRAME, .tp_retire_blk_tov = 5 };
	socklen_t len = version == TPACKET_V3 ? sizeof req : sizeof(struct tpacket_req);
	size_t whole;

	req.tp_block_nr = version == TPACKET_V3 ? (unsigned)slots : (unsigned)slots / 2;
	req.tp_frame_nr = req.tp_block_nr * (ring.block / FRAME);
	whole = (size_t)req.tp_block_nr * ring.block * (sends ? 2 : 1);
	sock_set(ring.fd, SOL_PACKET, PACKET_VERSION, version);
	TRY(setsockopt(ring.fd, SOL_PACKET, PACKET_RX_RING, &req, len));
	if (sends)
		TRY(setsockopt(ring.fd, SOL_PACKET, PACKET_TX_RING, &req, len));
	ring.memory = zoo_map(whole, PROT_READ | PROT_WRITE, MAP_SHARED, ring.fd);
	TRY(bind(ring.fd, (void *)&name, sizeof name));
	return ring;
}

/* Whether the slot that is read next is the program's. */
static inline bool ring_is_unread(struct ring *ring)
{
	char *slot = ring->memory + ring->at * (ring->version == TPACKET_V3 ? (int)ring->block : FRAME);
	volatile uint32_t *status = (void *)(slot + (ring->version == TPACKET_V3 ? 8 : 0));

	return ring->left || *status & TP_STATUS_USER;
}

/* Frames of TPACKET_V3 that are the program's, in blocks that it has not begun with. */
static inline int ring_unread(struct ring *ring)
{
	int frames = 0;

	for (int i = 0; i < ring->slots; i++) {
		char *slot = ring->memory + (ring->at + i) % ring->slots * (long)ring->block;
		volatile struct tpacket_hdr_v1 *block = &((struct tpacket_block_desc *)slot)->hdr.bh1;

		if (!(block->block_status & TP_STATUS_USER))
			break;
		frames += block->num_pkts;
	}
	return frames;
}

/* The number of the next frame. */
static inline int ring_read(struct ring *ring)
{
	char *slot, *data;
	int number;

	WAIT_UNTIL(ring_is_unread(ring));
	if (ring->version == TPACKET_V3) {
		struct tpacket_block_desc *block = (void *)(ring->memory + ring->at * (long)ring->block);

		if (!ring->left) {
			ring->left = block->hdr.bh1.num_pkts;
			ring->offset = block->hdr.bh1.offset_to_first_pkt;
			CHECK(ring->left);
		}
		slot = (char *)block + ring->offset;
		data = slot + ((struct tpacket3_hdr *)slot)->tp_mac;
		memcpy(&number, data + 14, sizeof number);
		ring->offset += ((struct tpacket3_hdr *)slot)->tp_next_offset;
		if (--ring->left == 0) {
			block->hdr.bh1.block_status = TP_STATUS_KERNEL;
			ring->at = (ring->at + 1) % ring->slots;
		}
		return number;
	}
	slot = ring->memory + ring->at * FRAME;
	data = slot + (ring->version == TPACKET_V1 ? ((struct tpacket_hdr *)slot)->tp_mac
						   : ((struct tpacket2_hdr *)slot)->tp_mac);
	memcpy(&number, data + 14, sizeof number);
	*(volatile uint32_t *)slot = TP_STATUS_KERNEL;
	ring->at = (ring->at + 1) % ring->slots;
	return number;
}
