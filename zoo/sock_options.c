// area: UDP and raw sockets
// shows: options of UDP sockets: priority, mark, bound device, TTL, multicast, packet info, buffers, timeouts
// modes: plain leave-running pidns ns
// foreign: no CRIU's images have fewer options
#include "zoo.h"
#include "tcp.h"

static const struct {
	int level, name, value;
} options[] = {
	{ SOL_SOCKET, SO_PRIORITY, 5 },	     { SOL_SOCKET, SO_MARK, 12 },
	{ SOL_SOCKET, SO_DONTROUTE, 1 },     { SOL_SOCKET, SO_NO_CHECK, 1 },
	{ SOL_SOCKET, SO_REUSEADDR, 1 },     { SOL_SOCKET, SO_REUSEPORT, 1 },
	{ SOL_SOCKET, SO_BROADCAST, 1 },     { SOL_SOCKET, SO_OOBINLINE, 1 },
	{ SOL_SOCKET, SO_TIMESTAMP, 1 },     { IPPROTO_IP, IP_TTL, 44 },
	{ IPPROTO_IP, IP_TOS, 0x08 },	     { IPPROTO_IP, IP_PKTINFO, 1 },
	{ IPPROTO_IP, IP_FREEBIND, 1 },	     { IPPROTO_IP, IP_MULTICAST_TTL, 9 },
	{ IPPROTO_IP, IP_MULTICAST_LOOP, 0 }, { IPPROTO_IP, IP_TRANSPARENT, 1 },
	{ IPPROTO_IP, IP_RECVTTL, 1 },
};

int main(void)
{
	enum { N = sizeof options / sizeof *options };
	int set = TRY(socket(AF_INET, SOCK_DGRAM, 0)), unset = TRY(socket(AF_INET, SOCK_DGRAM, 0));
	int before[N], plain[N];
	char device[32] = { 0 };
	socklen_t len = sizeof device;

	for (int i = 0; i < N; i++) {
		sock_set(set, options[i].level, options[i].name, options[i].value);
		plain[i] = sock_option(unset, options[i].level, options[i].name);
	}
	/* Read back when all are set: the type of service decides the priority as well. */
	for (int i = 0; i < N; i++)
		before[i] = sock_option(set, options[i].level, options[i].name);
	TRY(setsockopt(set, SOL_SOCKET, SO_BINDTODEVICE, "lo", 3));
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < N; i++) {
		int now = sock_option(set, options[i].level, options[i].name);

		if (now != before[i])
			zoo_fail("option %d of level %d is %d, was %d", options[i].name, options[i].level, now, before[i]);
		CHECK_EQ(sock_option(unset, options[i].level, options[i].name), plain[i]);
	}
	TRY(getsockopt(set, SOL_SOCKET, SO_BINDTODEVICE, device, &len));
	CHECK(strcmp(device, "lo") == 0);
	zoo_pass();
}
