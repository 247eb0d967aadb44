// area: TCP
// shows: IPv6 listeners with and without IPV6_V6ONLY, and an IPv4 connection over an IPv6 socket
// foreign: yes
// options: --tcp-established
#include "zoo.h"
#include "tcp.h"

int main(void)
{
	union tcp_name name = { .v6 = { .sin6_family = AF_INET6 } }, only, v4;
	int dual = TRY(socket(AF_INET6, SOCK_STREAM, 0)), strict, client, server;
	socklen_t len = sizeof name.v6;

	TRY(bind(dual, &name.any, len));
	TRY(listen(dual, 3));
	TRY(getsockname(dual, &name.any, &len));
	strict = TRY(socket(AF_INET6, SOCK_STREAM, 0));
	sock_set(strict, IPPROTO_IPV6, IPV6_V6ONLY, 1);
	tcp_loopback(&only, AF_INET6, 0);
	TRY(bind(strict, &only.any, sizeof only.v6));
	TRY(listen(strict, 3));
	tcp_loopback(&v4, AF_INET, ntohs(name.v6.sin6_port));
	client = tcp_dial(&v4);
	server = TRY(accept(dual, NULL, NULL));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(sock_option(dual, IPPROTO_IPV6, IPV6_V6ONLY), 0);
	CHECK_EQ(sock_option(strict, IPPROTO_IPV6, IPV6_V6ONLY), 1);
	tcp_talk(client, server);
	len = sizeof name.v6;
	TRY(getpeername(server, &name.any, &len));
	CHECK_EQ(name.any.sa_family, AF_INET6);
	CHECK(IN6_IS_ADDR_V4MAPPED(&name.v6.sin6_addr));
	client = tcp_dial(&v4);
	tcp_talk(client, TRY(accept(dual, NULL, NULL)));
	zoo_pass();
}
