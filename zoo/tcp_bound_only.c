// area: TCP
// shows: sockets that are bound and were never connected: to any address, to a port, to a port of the kernel's choice, after a failed connection
// options: --tcp-established
// foreign: no CRIU's images do not say that a port was the kernel's choice
#include "zoo.h"
#include "tcp.h"

int main(void)
{
	int families[] = { AF_INET, AF_INET6 }, bound[2], any[2], failed[2], twice, listener;
	union tcp_name names[2], failures[2], target, got;
	socklen_t len;

	for (int i = 0; i < 2; i++) {
		union tcp_name nobody;
		int gone = tcp_listen(families[i], &nobody);

		TRY(close(gone));
		bound[i] = TRY(socket(families[i], SOCK_STREAM, 0));
		len = tcp_loopback(&names[i], families[i], 0);
		TRY(bind(bound[i], &names[i].any, len));
		TRY(getsockname(bound[i], &names[i].any, &len));
		/* An address, no port: the kernel chooses it at the end. */
		any[i] = TRY(socket(families[i], SOCK_STREAM, 0));
		sock_set(any[i], IPPROTO_IP, 24 /* IP_BIND_ADDRESS_NO_PORT */, 1);
		len = tcp_loopback(&got, families[i], 0);
		TRY(bind(any[i], &got.any, len));
		failed[i] = TRY(socket(families[i], SOCK_STREAM, 0));
		len = tcp_loopback(&failures[i], families[i], 0);
		TRY(bind(failed[i], &failures[i].any, len));
		TRY(getsockname(failed[i], &failures[i].any, &len));
		CHECK(connect(failed[i], &nobody.any, len) < 0 && errno == ECONNREFUSED);
	}
	twice = TRY(socket(AF_INET, SOCK_STREAM, 0));
	len = tcp_loopback(&got, AF_INET, 0);
	TRY(bind(twice, &got.any, len));
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 2; i++) {
		int family = families[i];
		socklen_t whole = family == AF_INET ? sizeof got.v4 : sizeof got.v6;

		listener = tcp_listen(family, &target);
		len = sizeof got;
		TRY(getsockname(bound[i], &got.any, &len));
		CHECK_EQ(got.v4.sin_port, names[i].v4.sin_port);
		len = sizeof got;
		TRY(getsockname(failed[i], &got.any, &len));
		CHECK_EQ(got.v4.sin_port, failures[i].v4.sin_port);
		len = sizeof got;
		TRY(getsockname(any[i], &got.any, &len));
		CHECK_EQ(got.v4.sin_port, 0);
		if (family == AF_INET)
			CHECK_EQ(got.v4.sin_addr.s_addr, htonl(INADDR_LOOPBACK));
		TRY(connect(bound[i], &target.any, whole));
		tcp_talk(bound[i], TRY(accept(listener, NULL, NULL)));
		TRY(connect(any[i], &target.any, whole));
		tcp_talk(any[i], TRY(accept(listener, NULL, NULL)));
		TRY(connect(failed[i], &target.any, whole));
		tcp_talk(failed[i], TRY(accept(listener, NULL, NULL)));
		TRY(close(listener));
	}
	CHECK_EQ(sock_option(twice, SOL_SOCKET, SO_ERROR), 0);
	zoo_pass();
}
