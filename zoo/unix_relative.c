// area: Unix sockets
// shows: a socket bound by a relative path in a directory that the task has left
// foreign: yes
#include "zoo.h"
#include <sys/socket.h>
#include <sys/un.h>

int main(void)
{
	struct sockaddr_un name = { AF_UNIX, "relative" }, got;
	int listener = TRY(socket(AF_UNIX, SOCK_STREAM, 0)), fd;
	socklen_t len = sizeof got;

	TRY(mkdir("inner", 0755));
	TRY(chdir("inner"));
	TRY(bind(listener, (void *)&name, sizeof name));
	TRY(listen(listener, 3));
	TRY(chdir(".."));
	zoo_ready();
	zoo_wait();
	TRY(getsockname(listener, (void *)&got, &len));
	CHECK(strcmp(got.sun_path, "relative") == 0);
	TRY(chdir("inner"));
	fd = TRY(socket(AF_UNIX, SOCK_STREAM, 0));
	TRY(connect(fd, (void *)&name, sizeof name));
	TRY(accept(listener, NULL, NULL));
	zoo_pass();
}
