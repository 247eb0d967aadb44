// area: network namespaces
// shows: --strict: packets that wait in the queue of a tun device to be read are refused
// dump: --strict
// expect: refused "wait in its queue"
// modes: ns
#include "zoo.h"
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <netinet/in.h>

int main(void)
{
	struct ifreq request = { .ifr_name = "tun0", .ifr_flags = IFF_TUN | IFF_NO_PI };
	struct sockaddr_in in = { AF_INET, 0, { htonl(0x0a4e0001) }, { 0 } };
	int fd = TRY(open("/dev/net/tun", O_RDWR | O_NONBLOCK)), udp = TRY(socket(AF_INET, SOCK_DGRAM, 0));
	struct pollfd waits = { fd, POLLIN, 0 };

	TRY(ioctl(fd, TUNSETIFF, &request));
	memcpy(&request.ifr_addr, &in, sizeof in);
	TRY(ioctl(udp, SIOCSIFADDR, &request));
	in.sin_addr.s_addr = htonl(0xffffff00);
	memcpy(&request.ifr_netmask, &in, sizeof in);
	TRY(ioctl(udp, SIOCSIFNETMASK, &request));
	request.ifr_flags = IFF_UP | IFF_RUNNING;
	TRY(ioctl(udp, SIOCSIFFLAGS, &request));
	in = (struct sockaddr_in){ AF_INET, htons(9), { htonl(0x0a4e0002) }, { 0 } };
	CHECK_EQ(sendto(udp, "ping", 4, 0, (void *)&in, sizeof in), 4);
	CHECK_EQ(poll(&waits, 1, 10000), 1);
	zoo_ready();
	zoo_wait();
	zoo_pass();
}
