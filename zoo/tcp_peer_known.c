// area: TCP
// shows: sockets that both sides have closed still know their peer (SO_PEERNAME)
// options: --tcp-established
// foreign: no CRIU's images do not have it
#include "zoo.h"
#include "tcp.h"

#ifndef SO_PEERNAME
#define SO_PEERNAME 28
#endif

/* The kernel does not take a longer buffer. */
static void tcp_peer(int fd, int family, union tcp_name *name)
{
	socklen_t len = family == AF_INET ? sizeof name->v4 : sizeof name->v6;

	memset(name, 0, sizeof *name);
	TRY(getsockopt(fd, SOL_SOCKET, SO_PEERNAME, name, &len));
}

int main(void)
{
	int families[] = { AF_INET, AF_INET6 }, fds[2];
	union tcp_name before[2], after, name;
	socklen_t len;
	char c;

	signal(SIGPIPE, SIG_IGN);
	for (int i = 0; i < 2; i++) {
		fds[i] = tcp_closed_by_both(families[i]);
		tcp_peer(fds[i], families[i], &before[i]);
	}
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 2; i++) {
		CHECK_EQ(tcp_state(fds[i]), TCP_CLOSE);
		tcp_peer(fds[i], families[i], &after);
		CHECK(memcmp(&after, &before[i], sizeof after) == 0);
		len = sizeof name;
		CHECK(getpeername(fds[i], &name.any, &len) < 0 && errno == ENOTCONN);
		CHECK_EQ(sock_option(fds[i], SOL_SOCKET, SO_ERROR), 0);
		CHECK_EQ(recv(fds[i], &c, 1, 0), 0);
		CHECK(send(fds[i], "x", 1, 0) < 0 && errno == EPIPE);
	}
	zoo_pass();
}
