// area: TCP
// shows: options of connected sockets: keepalive, linger, nodelay, cork, buffer sizes, marks, timeouts
// options: --tcp-established
// foreign: no CRIU's images have fewer options
#include "zoo.h"
#include "tcp.h"

static const struct {
	int level, name, value;
} options[] = {
	{ SOL_SOCKET, SO_KEEPALIVE, 1 },	{ IPPROTO_TCP, TCP_KEEPCNT, 5 },
	{ IPPROTO_TCP, TCP_KEEPIDLE, 123 },	{ IPPROTO_TCP, TCP_KEEPINTVL, 45 },
	{ IPPROTO_TCP, TCP_NODELAY, 1 },	{ SOL_SOCKET, SO_OOBINLINE, 1 },
	{ IPPROTO_IP, IP_TOS, 0x10 },		{ SOL_SOCKET, SO_PRIORITY, 4 },
	{ SOL_SOCKET, SO_RCVLOWAT, 3 },		{ IPPROTO_TCP, TCP_USER_TIMEOUT, 54321 },
	{ IPPROTO_IP, IP_TTL, 77 },
};

int main(void)
{
	enum { N = sizeof options / sizeof *options };
	struct linger linger = { 1, 17 }, now;
	int server, client, before[N], sizes[2];
	socklen_t len = sizeof now;

	tcp_pair(AF_INET, &server, &client);
	for (int i = 0; i < N; i++) {
		sock_set(client, options[i].level, options[i].name, options[i].value);
		before[i] = sock_option(server, options[i].level, options[i].name);
	}
	TRY(setsockopt(client, SOL_SOCKET, SO_LINGER, &linger, sizeof linger));
	sock_set(server, IPPROTO_TCP, TCP_CORK, 1);
	sock_set(server, SOL_SOCKET, SO_SNDBUF, 40000);
	sock_set(server, SOL_SOCKET, SO_RCVBUF, 50000);
	sizes[0] = sock_option(server, SOL_SOCKET, SO_SNDBUF);
	sizes[1] = sock_option(server, SOL_SOCKET, SO_RCVBUF);
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < N; i++) {
		if (sock_option(client, options[i].level, options[i].name) != options[i].value)
			zoo_fail("option %d of level %d is %d", options[i].name, options[i].level,
				 sock_option(client, options[i].level, options[i].name));
		CHECK_EQ(sock_option(server, options[i].level, options[i].name), before[i]);
	}
	TRY(getsockopt(client, SOL_SOCKET, SO_LINGER, &now, &len));
	CHECK_EQ(now.l_onoff, 1);
	CHECK_EQ(now.l_linger, 17);
	CHECK_EQ(sock_option(server, IPPROTO_TCP, TCP_CORK), 1);
	CHECK_EQ(sock_option(server, SOL_SOCKET, SO_SNDBUF), sizes[0]);
	CHECK_EQ(sock_option(server, SOL_SOCKET, SO_RCVBUF), sizes[1]);
	sock_set(server, IPPROTO_TCP, TCP_CORK, 0);
	tcp_talk(server, client);
	zoo_pass();
}
