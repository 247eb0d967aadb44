// area: Unix sockets
// shows: two listeners that were bound to one path one after the other, the older one moved away
// foreign: no CRIU's images have paths of sockets that are open under them
#include "zoo.h"
#include <sys/socket.h>
#include <sys/un.h>

int main(void)
{
	struct sockaddr_un name = { AF_UNIX, "name" }, moved = { AF_UNIX, "moved" };
	int a = TRY(socket(AF_UNIX, SOCK_STREAM, 0)), b = TRY(socket(AF_UNIX, SOCK_STREAM, 0)), fd;

	TRY(bind(a, (void *)&name, sizeof name));
	TRY(listen(a, 3));
	TRY(rename("name", "moved"));
	TRY(bind(b, (void *)&name, sizeof name));
	TRY(listen(b, 3));
	zoo_ready();
	zoo_wait();
	fd = TRY(socket(AF_UNIX, SOCK_STREAM, 0));
	TRY(connect(fd, (void *)&name, sizeof name));
	TRY(fcntl(a, F_SETFL, O_NONBLOCK));
	CHECK(accept(a, NULL, NULL) < 0 && errno == EAGAIN);
	TRY(accept(b, NULL, NULL));
	fd = TRY(socket(AF_UNIX, SOCK_STREAM, 0));
	TRY(connect(fd, (void *)&moved, sizeof moved));
	TRY(accept(a, NULL, NULL));
	zoo_pass();
}
