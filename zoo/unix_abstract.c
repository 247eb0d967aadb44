// area: Unix sockets
// shows: abstract names, with zero bytes in them: listening, bound only, datagrams with two clients
// foreign: yes
#include "zoo.h"
#include <stddef.h>
#include <sys/socket.h>
#include <sys/un.h>

/* Unique on this machine: abstract names are shared by all in a network namespace. */
static socklen_t make(struct sockaddr_un *name, int n)
{
	*name = (struct sockaddr_un){ .sun_family = AF_UNIX };
	snprintf(name->sun_path + 1, sizeof name->sun_path - 1, "zoo %d %d", getpid(), n);
	memcpy(name->sun_path + 40, "\0tail", 5);
	return offsetof(struct sockaddr_un, sun_path) + 45;
}

int main(void)
{
	struct sockaddr_un names[3], got;
	socklen_t lens[3], len;
	int listener, bound, dgram, clients[2], fd, server;
	char text[16];

	for (int i = 0; i < 3; i++)
		lens[i] = make(&names[i], i);
	listener = TRY(socket(AF_UNIX, SOCK_STREAM, 0));
	TRY(bind(listener, (void *)&names[0], lens[0]));
	TRY(listen(listener, 3));
	bound = TRY(socket(AF_UNIX, SOCK_STREAM, 0));
	TRY(bind(bound, (void *)&names[1], lens[1]));
	dgram = TRY(socket(AF_UNIX, SOCK_DGRAM, 0));
	TRY(bind(dgram, (void *)&names[2], lens[2]));
	for (int i = 0; i < 2; i++) {
		clients[i] = TRY(socket(AF_UNIX, SOCK_DGRAM, 0));
		TRY(connect(clients[i], (void *)&names[2], lens[2]));
		CHECK_EQ(write(clients[i], "message", i + 2), i + 2);
	}
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 2; i++)
		CHECK_EQ(read(dgram, text, sizeof text), i + 2);
	CHECK(recv(dgram, text, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN);
	fd = TRY(socket(AF_UNIX, SOCK_STREAM, 0));
	CHECK(connect(fd, (void *)&names[1], lens[1]) < 0 && errno == ECONNREFUSED);
	TRY(listen(bound, 3));
	TRY(connect(fd, (void *)&names[1], lens[1]));
	server = TRY(accept(bound, NULL, NULL));
	CHECK_EQ(write(fd, "x", 1), 1);
	CHECK_EQ(read(server, text, 1), 1);
	len = sizeof got;
	TRY(getsockname(server, (void *)&got, &len));
	CHECK_EQ(len, lens[1]);
	CHECK(memcmp(&got, &names[1], len) == 0);
	fd = TRY(socket(AF_UNIX, SOCK_STREAM, 0));
	TRY(connect(fd, (void *)&names[0], lens[0]));
	zoo_pass();
}
