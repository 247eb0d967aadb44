/* TCP over the loopback device. */
#ifndef ZOO_TCP_H
#define ZOO_TCP_H

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

union tcp_name {
	struct sockaddr any;
	struct sockaddr_in v4;
	struct sockaddr_in6 v6;
};

static inline socklen_t tcp_loopback(union tcp_name *name, int family, int port)
{
	memset(name, 0, sizeof *name);
	name->any.sa_family = (sa_family_t)family;
	/* Both kinds keep the port at the same place. */
	name->v4.sin_port = htons((uint16_t)port);
	if (family == AF_INET) {
		name->v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
		return sizeof name->v4;
	}
	name->v6.sin6_addr = in6addr_loopback;
	return sizeof name->v6;
}

/* Listens on any free port, which is left in NAME. */
static inline int tcp_listen(int family, union tcp_name *name)
{
	socklen_t len = tcp_loopback(name, family, 0);
	int fd = TRY(socket(family, SOCK_STREAM, 0));

	TRY(bind(fd, &name->any, len));
	TRY(listen(fd, 8));
	TRY(getsockname(fd, &name->any, &len));
	return fd;
}

static inline int tcp_dial(const union tcp_name *name)
{
	int fd = TRY(socket(name->any.sa_family, SOCK_STREAM, 0));

	TRY(connect(fd, &name->any, name->any.sa_family == AF_INET ? sizeof name->v4 : sizeof name->v6));
	return fd;
}

/* A connection: its two ends, with no listener left. */
static inline void tcp_pair(int family, int *server, int *client)
{
	union tcp_name name;
	int listener = tcp_listen(family, &name);

	*client = tcp_dial(&name);
	*server = TRY(accept(listener, NULL, NULL));
	TRY(close(listener));
}

static inline int tcp_state(int fd)
{
	struct tcp_info info;
	socklen_t len = sizeof info;

	TRY(getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len));
	return info.tcpi_state;
}

/* One end of a connection that both have closed; the other one is gone. */
static inline int tcp_closed_by_both(int family)
{
	int server, client;
	char c;

	tcp_pair(family, &server, &client);
	TRY(shutdown(server, SHUT_WR));
	CHECK_EQ(recv(client, &c, 1, 0), 0);
	TRY(shutdown(client, SHUT_WR));
	CHECK_EQ(recv(server, &c, 1, 0), 0);
	WAIT_UNTIL(tcp_state(client) == TCP_CLOSE);
	TRY(close(server));
	return client;
}

/* Both ends work in both directions. */
static inline void tcp_talk(int a, int b)
{
	char text[4];

	CHECK_EQ(send(a, "ping", 4, 0), 4);
	CHECK_EQ(recv(b, text, 4, MSG_WAITALL), 4);
	CHECK(memcmp(text, "ping", 4) == 0);
	CHECK_EQ(send(b, "pong", 4, 0), 4);
	CHECK_EQ(recv(a, text, 4, MSG_WAITALL), 4);
	CHECK(memcmp(text, "pong", 4) == 0);
}

static inline int sock_option(int fd, int level, int name)
{
	int value = 0;
	socklen_t len = sizeof value;

	TRY(getsockopt(fd, level, name, &value, &len));
	return value;
}

static inline void sock_set(int fd, int level, int name, int value)
{
	TRY(setsockopt(fd, level, name, &value, sizeof value));
}

#endif
