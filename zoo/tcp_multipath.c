// area: TCP
// shows: listeners of Multipath TCP, with the connections that they have accepted from peers that know only TCP
// foreign: yes
// options: --tcp-established
#include "zoo.h"
#include "tcp.h"

#ifndef IPPROTO_MPTCP
#define IPPROTO_MPTCP 262
#endif

int main(void)
{
	int families[] = { AF_INET, AF_INET6 }, listeners[2], servers[2], clients[2], unbound;
	union tcp_name names[2];

	for (int i = 0; i < 2; i++) {
		socklen_t len = tcp_loopback(&names[i], families[i], 0);

		listeners[i] = socket(families[i], SOCK_STREAM | SOCK_NONBLOCK, IPPROTO_MPTCP);
		if (listeners[i] < 0)
			zoo_skip("no Multipath TCP");
		sock_set(listeners[i], SOL_SOCKET, SO_REUSEADDR, 1);
		TRY(bind(listeners[i], &names[i].any, len));
		TRY(listen(listeners[i], 8));
		TRY(getsockname(listeners[i], &names[i].any, &len));
		clients[i] = tcp_dial(&names[i]);
		WAIT_UNTIL((servers[i] = accept(listeners[i], NULL, NULL)) >= 0);
	}
	unbound = TRY(socket(AF_INET, SOCK_STREAM, IPPROTO_MPTCP));
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 2; i++) {
		int multipath = TRY(socket(families[i], SOCK_STREAM, IPPROTO_MPTCP)), server;

		CHECK_EQ(sock_option(listeners[i], SOL_SOCKET, SO_PROTOCOL), IPPROTO_MPTCP);
		CHECK_EQ(sock_option(listeners[i], SOL_SOCKET, SO_ACCEPTCONN), 1);
		CHECK_EQ(sock_option(listeners[i], SOL_SOCKET, SO_REUSEADDR), 1);
		CHECK_EQ(sock_option(servers[i], SOL_SOCKET, SO_PROTOCOL), IPPROTO_TCP);
		tcp_talk(servers[i], clients[i]);
		/* It still accepts both kinds. */
		TRY(close(clients[i]));
		clients[i] = tcp_dial(&names[i]);
		WAIT_UNTIL((server = accept(listeners[i], NULL, NULL)) >= 0);
		tcp_talk(server, clients[i]);
		TRY(connect(multipath, &names[i].any, i ? sizeof names[i].v6 : sizeof names[i].v4));
		WAIT_UNTIL((server = accept(listeners[i], NULL, NULL)) >= 0);
		CHECK_EQ(sock_option(server, SOL_SOCKET, SO_PROTOCOL), IPPROTO_MPTCP);
		tcp_talk(server, multipath);
	}
	TRY(connect(unbound, &names[0].any, sizeof names[0].v4));
	zoo_pass();
}
