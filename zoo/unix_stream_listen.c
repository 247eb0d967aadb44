// area: Unix sockets
// shows: a listener by path with accepted clients in two processes, and one more client to come
// foreign: yes
#include "zoo.h"
#include <sys/socket.h>
#include <sys/un.h>

static struct sockaddr_un name = { AF_UNIX, "listener" };

static int dial(void)
{
	int fd = TRY(socket(AF_UNIX, SOCK_STREAM, 0));

	TRY(connect(fd, (void *)&name, sizeof name));
	return fd;
}

int main(void)
{
	int listener = TRY(socket(AF_UNIX, SOCK_STREAM, 0)), server, client;
	struct sockaddr_un got;
	socklen_t len = sizeof got;
	char c;
	pid_t child;

	TRY(bind(listener, (void *)&name, sizeof name));
	TRY(chmod("listener", 0623));
	TRY(listen(listener, 7));
	child = TRY(fork());
	if (child == 0) {
		client = dial();
		TRY(close(listener));
		CHECK_EQ(write(client, "1", 1), 1);
		zoo_tell("child");
		zoo_wait();
		CHECK_EQ(read(client, &c, 1), 1);
		CHECK_EQ(c, '2');
		_exit(0);
	}
	server = TRY(accept(listener, NULL, NULL));
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK_EQ(read(server, &c, 1), 1);
	CHECK_EQ(c, '1');
	CHECK_EQ(write(server, "2", 1), 1);
	TRY(getsockname(server, (void *)&got, &len));
	CHECK(strcmp(got.sun_path, "listener") == 0);
	CHECK_EXIT(child, 0);
	client = dial();
	server = TRY(accept(listener, NULL, NULL));
	CHECK_EQ(write(client, "3", 1), 1);
	CHECK_EQ(read(server, &c, 1), 1);
	zoo_pass();
}
