// area: UDP and raw sockets
// shows: options of IPv6 sockets, and a socket bound to a foreign address with FREEBIND
// foreign: yes
// modes: plain leave-running pidns ns
#include "zoo.h"
#include "tcp.h"

int main(void)
{
	int names[] = { IPV6_FREEBIND, IPV6_RECVPKTINFO, IPV6_V6ONLY }, fds[2], foreign;
	struct sockaddr_in6 address = { .sin6_family = AF_INET6, .sin6_port = htons(4321) }, got;
	socklen_t len = sizeof got;

	for (int on = 0; on < 2; on++) {
		fds[on] = TRY(socket(AF_INET6, SOCK_DGRAM, 0));
		for (int i = 0; i < 3; i++)
			sock_set(fds[on], IPPROTO_IPV6, names[i], on);
	}
	foreign = TRY(socket(AF_INET6, SOCK_DGRAM, 0));
	sock_set(foreign, IPPROTO_IPV6, IPV6_FREEBIND, 1);
	CHECK_EQ(inet_pton(AF_INET6, "2001:db8::77", &address.sin6_addr), 1);
	TRY(bind(foreign, (void *)&address, sizeof address));
	sock_set(foreign, IPPROTO_IPV6, IPV6_FREEBIND, 0);
	zoo_ready();
	zoo_wait();
	for (int on = 0; on < 2; on++)
		for (int i = 0; i < 3; i++)
			CHECK_EQ(sock_option(fds[on], IPPROTO_IPV6, names[i]), on);
	TRY(getsockname(foreign, (void *)&got, &len));
	CHECK(memcmp(&got.sin6_addr, &address.sin6_addr, 16) == 0 && got.sin6_port == address.sin6_port);
	CHECK_EQ(sock_option(foreign, IPPROTO_IPV6, IPV6_FREEBIND), 0);
	zoo_pass();
}
