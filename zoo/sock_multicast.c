// area: UDP and raw sockets
// shows: memberships of multicast groups
// foreign: no CRIU's images do not have it
#include "zoo.h"
#include "tcp.h"

int main(void)
{
	struct ip_mreqn group = { .imr_ifindex = 1 };
	int fd = TRY(socket(AF_INET, SOCK_DGRAM, 0));

	group.imr_multiaddr.s_addr = htonl(0xe0000123);
	if (setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &group, sizeof group))
		zoo_skip("no multicast on the loopback device");
	zoo_ready();
	zoo_wait();
	CHECK(setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &group, sizeof group) < 0 && errno == EADDRINUSE);
	zoo_pass();
}
