// area: TCP
// shows: listening sockets with their options; a client socket made before connects after
// foreign: no CRIU's images have fewer options
#include "zoo.h"
#include "tcp.h"

int main(void)
{
	union tcp_name names[2];
	int listeners[2] = { tcp_listen(AF_INET, &names[0]), tcp_listen(AF_INET6, &names[1]) };
	int early = TRY(socket(AF_INET, SOCK_STREAM, 0)), server;

	sock_set(listeners[0], SOL_SOCKET, SO_REUSEADDR, 1);
	sock_set(listeners[1], IPPROTO_TCP, TCP_DEFER_ACCEPT, 4);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(sock_option(listeners[0], SOL_SOCKET, SO_REUSEADDR), 1);
	CHECK_EQ(sock_option(listeners[0], SOL_SOCKET, SO_ACCEPTCONN), 1);
	CHECK(sock_option(listeners[1], IPPROTO_TCP, TCP_DEFER_ACCEPT) >= 4);
	TRY(connect(early, &names[0].any, sizeof names[0].v4));
	server = TRY(accept(listeners[0], NULL, NULL));
	tcp_talk(server, early);
	early = tcp_dial(&names[1]);
	CHECK_EQ(send(early, "x", 1, 0), 1);
	server = TRY(accept(listeners[1], NULL, NULL));
	zoo_pass();
}
