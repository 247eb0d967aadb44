// area: TCP
// shows: sockets that are not connected: never bound, bound only, port shared with SO_REUSEPORT
// foreign: yes
#include "zoo.h"
#include "tcp.h"

int main(void)
{
	union tcp_name name, target, got;
	int fresh = TRY(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0)), bound = TRY(socket(AF_INET, SOCK_STREAM, 0));
	int twins[2], listener;
	socklen_t len = tcp_loopback(&name, AF_INET, 0);

	TRY(bind(bound, &name.any, len));
	TRY(getsockname(bound, &name.any, &len));
	listener = tcp_listen(AF_INET, &target);
	tcp_loopback(&got, AF_INET, 0);
	for (int i = 0; i < 2; i++) {
		twins[i] = TRY(socket(AF_INET, SOCK_STREAM, 0));
		sock_set(twins[i], SOL_SOCKET, SO_REUSEPORT, 1);
		TRY(bind(twins[i], &got.any, len));
		TRY(getsockname(twins[i], &got.any, &len));
		TRY(listen(twins[i], 3));
	}
	zoo_ready();
	zoo_wait();
	CHECK_EQ(fcntl(fresh, F_GETFL) & O_NONBLOCK, O_NONBLOCK);
	CHECK_EQ(sock_option(twins[1], SOL_SOCKET, SO_REUSEPORT), 1);
	len = sizeof got.v4;
	TRY(getsockname(bound, &got.any, &len));
	CHECK_EQ(got.v4.sin_port, name.v4.sin_port);
	TRY(connect(bound, &target.any, sizeof target.v4));
	tcp_talk(bound, TRY(accept(listener, NULL, NULL)));
	tcp_loopback(&got, AF_INET, 0);
	TRY(bind(fresh, &got.any, sizeof got.v4));
	TRY(listen(fresh, 1));
	zoo_pass();
}
