// area: UDP and raw sockets
// shows: datagrams that are received and not yet read, with their senders: IPv4, IPv6, mapped, empty, connected
// foreign: no CRIU keeps no datagrams that wait
#include "zoo.h"
#include "tcp.h"

enum { V4, V4_ANY, V6, MAPPED, CONNECTED, KINDS };

static int socks[KINDS];
static union tcp_name names[KINDS], senders[KINDS];

static socklen_t size(const union tcp_name *name)
{
	return name->any.sa_family == AF_INET ? sizeof name->v4 : sizeof name->v6;
}

static int bound(int family, union tcp_name *name, bool any)
{
	socklen_t len = tcp_loopback(name, family, 0);
	int fd = TRY(socket(family, SOCK_DGRAM, 0));

	if (any && family == AF_INET)
		name->v4.sin_addr.s_addr = INADDR_ANY;
	if (any && family == AF_INET6)
		name->v6.sin6_addr = in6addr_any;
	TRY(bind(fd, &name->any, len));
	TRY(getsockname(fd, &name->any, &len));
	return fd;
}

static void reach(union tcp_name *name, int family)
{
	in_port_t port = name->v4.sin_port;

	tcp_loopback(name, family, 0);
	name->v4.sin_port = port;
}

/* Five datagrams; their sender is gone afterwards. */
static void send_five(int kind, int family)
{
	static char large[9000];
	int fd = bound(family, &senders[kind], false);

	reach(&names[kind], family);
	if (kind == CONNECTED)
		TRY(connect(socks[kind], &senders[kind].any, size(&senders[kind])));
	CHECK_EQ(sendto(fd, "first", 5, 0, &names[kind].any, size(&names[kind])), 5);
	CHECK_EQ(sendto(fd, "", 0, 0, &names[kind].any, size(&names[kind])), 0);
	CHECK_EQ(sendto(fd, "odd", 3, 0, &names[kind].any, size(&names[kind])), 3);
	CHECK_EQ(sendto(fd, large, sizeof large, 0, &names[kind].any, size(&names[kind])), sizeof large);
	CHECK_EQ(sendto(fd, "last", 4, 0, &names[kind].any, size(&names[kind])), 4);
	TRY(close(fd));
}

static void read_five(int kind)
{
	static const ssize_t lengths[] = { 5, 0, 3, 9000, 4 };
	char text[10000];

	for (int i = 0; i < 5; i++) {
		union tcp_name from;
		socklen_t len = sizeof from;

		CHECK_EQ(recvfrom(socks[kind], text, sizeof text, MSG_DONTWAIT, &from.any, &len), lengths[i]);
		CHECK_EQ(from.v4.sin_port, senders[kind].v4.sin_port);
		if (kind == MAPPED)
			CHECK(IN6_IS_ADDR_V4MAPPED(&from.v6.sin6_addr));
		else if (from.any.sa_family == AF_INET)
			CHECK_EQ(from.v4.sin_addr.s_addr, senders[kind].v4.sin_addr.s_addr);
		else
			CHECK(IN6_IS_ADDR_LOOPBACK(&from.v6.sin6_addr));
		if (i == 4)
			CHECK(!memcmp(text, "last", 4));
	}
	CHECK_EQ(recv(socks[kind], text, sizeof text, MSG_DONTWAIT), -1);
}

int main(void)
{
	union tcp_name extra;
	int fd;

	socks[V4] = bound(AF_INET, &names[V4], false);
	socks[V4_ANY] = bound(AF_INET, &names[V4_ANY], true);
	socks[V6] = bound(AF_INET6, &names[V6], false);
	socks[MAPPED] = bound(AF_INET6, &names[MAPPED], true);
	socks[CONNECTED] = bound(AF_INET, &names[CONNECTED], false);
	send_five(V4, AF_INET);
	send_five(V4_ANY, AF_INET);
	send_five(V6, AF_INET6);
	send_five(MAPPED, AF_INET);
	send_five(CONNECTED, AF_INET);
	zoo_ready();
	zoo_wait();
	for (int kind = 0; kind < KINDS; kind++)
		read_five(kind);
	fd = bound(AF_INET, &extra, false);
	CHECK_EQ(sendto(fd, "later", 5, 0, &names[V4].any, size(&names[V4])), 5);
	CHECK_EQ(recv(socks[V4], (char[8]){ 0 }, 8, 0), 5);
	zoo_pass();
}
