// area: network namespaces
// shows: tun and tap devices: queues, one of them detached, persistent or not, owner, header and buffer sizes, packets both ways
// modes: ns sealed userns
// varies: fd
#include "zoo.h"
#include "tcp.h"
#include <net/if.h>
#include <linux/if_tun.h>
#include <sys/ioctl.h>

#define NET 0x0a4d0000u /* 10.77.0.0/24 */

/* Gives a device an address, and brings it up. */
static void set_up(const char *name, uint32_t address)
{
	struct sockaddr_in in = { AF_INET, 0, { htonl(address) }, { 0 } };
	int fd = TRY(socket(AF_INET, SOCK_DGRAM, 0));
	struct ifreq request = { 0 };

	strcpy(request.ifr_name, name);
	memcpy(&request.ifr_addr, &in, sizeof in);
	TRY(ioctl(fd, SIOCSIFADDR, &request));
	in.sin_addr.s_addr = htonl(0xffffff00);
	memcpy(&request.ifr_netmask, &in, sizeof in);
	TRY(ioctl(fd, SIOCSIFNETMASK, &request));
	request.ifr_flags = IFF_UP | IFF_RUNNING;
	TRY(ioctl(fd, SIOCSIFFLAGS, &request));
	TRY(close(fd));
}

static int queue(const char *name, short flags)
{
	struct ifreq request = { .ifr_flags = flags };
	int fd = TRY(open("/dev/net/tun", O_RDWR | O_NONBLOCK));

	strcpy(request.ifr_name, name);
	TRY(ioctl(fd, TUNSETIFF, &request));
	return fd;
}

static short flags_of(int fd, const char *name)
{
	struct ifreq got;

	TRY(ioctl(fd, TUNGETIFF, &got));
	CHECK_EQ(strcmp(got.ifr_name, name), 0);
	return got.ifr_flags;
}

static int number(int fd, unsigned long request)
{
	int value;

	TRY(ioctl(fd, request, &value));
	return value;
}

/* A packet to a neighbour comes out of the queue, and one that is written into it arrives. */
static void exchange(int fd)
{
	int udp = TRY(socket(AF_INET, SOCK_DGRAM, 0));
	struct sockaddr_in here = { AF_INET, htons(7), { htonl(NET | 1) }, { 0 } };
	struct sockaddr_in there = { AF_INET, htons(9), { htonl(NET | 2) }, { 0 } };
	unsigned char packet[2048], answer[2048];
	ssize_t len;

	TRY(bind(udp, (void *)&here, sizeof here));
	CHECK_EQ(sendto(udp, "ping", 4, 0, (void *)&there, sizeof there), 4);
	do {
		WAIT_UNTIL((len = read(fd, packet, sizeof packet)) > 0);
		/* Not one of the kernel's own, which come when it likes. */
	} while (packet[0] != 0x45 || packet[9] != IPPROTO_UDP);
	CHECK_EQ(len, 20 + 8 + 4);
	CHECK_EQ(memcmp(packet + 28, "ping", 4), 0);
	/* Back to where it came from: the sums stay what they are, the checksum of UDP may be left out. */
	memcpy(answer, packet, len);
	memcpy(answer + 12, packet + 16, 4);
	memcpy(answer + 16, packet + 12, 4);
	memcpy(answer + 20, packet + 22, 2);
	memcpy(answer + 22, packet + 20, 2);
	memset(answer + 26, 0, 2);
	CHECK_EQ(write(fd, answer, len), len);
	WAIT_UNTIL(recv(udp, answer, sizeof answer, MSG_DONTWAIT) == 4);
	CHECK_EQ(memcmp(answer, "ping", 4), 0);
	TRY(close(udp));
}

int main(void)
{
	int unset = TRY(open("/dev/net/tun", O_RDWR)), tun = queue("tun0", IFF_TUN | IFF_NO_PI);
	int taps[3], rest = queue("tap1", IFF_TAP | IFF_NO_PI | IFF_VNET_HDR), size = 12, buffer = 100000;
	struct ifreq off = { .ifr_flags = IFF_DETACH_QUEUE };

	for (int i = 0; i < 3; i++)
		taps[i] = queue("tap2", IFF_TAP | IFF_NO_PI | IFF_MULTI_QUEUE);
	TRY(ioctl(taps[1], TUNSETQUEUE, &off));
	/* One that nobody serves. */
	TRY(ioctl(rest, TUNSETPERSIST, 1));
	TRY(ioctl(rest, TUNSETOWNER, 1));
	TRY(ioctl(rest, TUNSETVNETHDRSZ, &size));
	TRY(close(rest));
	TRY(ioctl(tun, TUNSETSNDBUF, &buffer));
	set_up("tun0", NET | 1);
	exchange(tun);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(flags_of(tun, "tun0") & (IFF_TUN | IFF_NO_PI | IFF_PERSIST), IFF_TUN | IFF_NO_PI);
	CHECK_EQ(number(tun, TUNGETSNDBUF), buffer);
	CHECK(fcntl(tun, F_GETFL) & O_NONBLOCK);
	CHECK(!(fcntl(unset, F_GETFL) & O_NONBLOCK));
	exchange(tun);
	for (int i = 0; i < 3; i++) {
		CHECK_EQ(!!(flags_of(taps[i], "tap2") & IFF_DETACH_QUEUE), i == 1);
		CHECK(flags_of(taps[i], "tap2") & IFF_MULTI_QUEUE);
	}
	off.ifr_flags = IFF_ATTACH_QUEUE;
	TRY(ioctl(taps[1], TUNSETQUEUE, &off));
	rest = queue("tap1", IFF_TAP | IFF_NO_PI | IFF_VNET_HDR);
	CHECK(flags_of(rest, "tap1") & IFF_PERSIST);
	CHECK_EQ(number(rest, TUNGETVNETHDRSZ), size);
	CHECK_EQ(ioctl(unset, TUNGETIFF, &off), -1);
	CHECK_EQ(errno, EBADFD);
	/* A device that is not persistent ends with its last queue, and its name is free. */
	TRY(close(tun));
	CHECK_EQ(if_nametoindex("tun0"), 0);
	zoo_pass();
}
