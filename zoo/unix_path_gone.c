// area: Unix sockets
// shows: sockets whose paths are removed: a listener, an accepted connection, a datagram server with clients
// foreign: yes
#include "zoo.h"
#include <sys/socket.h>
#include <sys/un.h>

int main(void)
{
	struct sockaddr_un stream = { AF_UNIX, "stream" }, dgram = { AF_UNIX, "dir/dgram" }, got;
	int listener = TRY(socket(AF_UNIX, SOCK_STREAM, 0)), client, server, fd, senders[5];
	socklen_t len = sizeof got;
	char text[8];

	TRY(bind(listener, (void *)&stream, sizeof stream));
	TRY(listen(listener, 3));
	client = TRY(socket(AF_UNIX, SOCK_STREAM, 0));
	TRY(connect(client, (void *)&stream, sizeof stream));
	server = TRY(accept(listener, NULL, NULL));
	TRY(close(listener));
	TRY(unlink("stream"));
	TRY(mkdir("dir", 0755));
	fd = TRY(socket(AF_UNIX, SOCK_DGRAM, 0));
	TRY(bind(fd, (void *)&dgram, sizeof dgram));
	for (int i = 0; i < 5; i++) {
		senders[i] = TRY(socket(AF_UNIX, SOCK_DGRAM, 0));
		TRY(connect(senders[i], (void *)&dgram, sizeof dgram));
	}
	TRY(unlink("dir/dgram"));
	TRY(rmdir("dir"));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(write(client, "x", 1), 1);
	CHECK_EQ(read(server, text, 8), 1);
	TRY(getsockname(server, (void *)&got, &len));
	CHECK(strcmp(got.sun_path, "stream") == 0);
	for (int i = 0; i < 5; i++) {
		CHECK_EQ(write(senders[i], "12345", i + 1), i + 1);
		CHECK_EQ(read(fd, text, 8), i + 1);
	}
	CHECK(access("stream", F_OK) < 0 && access("dir", F_OK) < 0);
	zoo_pass();
}
