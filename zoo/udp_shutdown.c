// area: UDP and raw sockets
// shows: connected UDP sockets that were shut down for reading, for writing, and with SO_BROADCAST
// foreign: yes
#include "zoo.h"
#include "tcp.h"

int main(void)
{
	union tcp_name name;
	int fds[2], broadcast = TRY(socket(AF_INET, SOCK_DGRAM, 0));
	socklen_t len = tcp_loopback(&name, AF_INET, 0);
	char c;

	signal(SIGPIPE, SIG_IGN);
	for (int i = 0; i < 2; i++) {
		fds[i] = TRY(socket(AF_INET, SOCK_DGRAM, 0));
		tcp_loopback(&name, AF_INET, 0);
		TRY(bind(fds[i], &name.any, len));
		TRY(getsockname(fds[i], &name.any, &len));
		TRY(connect(fds[i], &name.any, len));
	}
	TRY(shutdown(fds[0], SHUT_RD));
	TRY(shutdown(fds[1], SHUT_WR));
	sock_set(broadcast, SOL_SOCKET, SO_BROADCAST, 1);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(recv(fds[0], &c, 1, 0), 0);
	CHECK_EQ(send(fds[0], "x", 1, 0), 1);
	CHECK(send(fds[1], "x", 1, 0) < 0 && errno == EPIPE);
	CHECK(recv(fds[1], &c, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN);
	CHECK_EQ(sock_option(broadcast, SOL_SOCKET, SO_BROADCAST), 1);
	zoo_pass();
}
