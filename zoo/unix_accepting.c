// area: Unix sockets
// shows: a server by Unix sockets with requests in connections that wait to be accepted at nearly every moment: all are served
// foreign: yes
// modes: plain leave-running ns
// varies: fd
#include "accepting.h"
#include <sys/un.h>

static int dial(const void *name)
{
	int fd = TRY(socket(AF_UNIX, SOCK_STREAM, 0));

	TRY(connect(fd, name, sizeof(struct sockaddr_un)));
	return fd;
}

int main(void)
{
	static const struct sockaddr_un name = { AF_UNIX, "server" };
	int listener = TRY(socket(AF_UNIX, SOCK_STREAM, 0));

	TRY(bind(listener, (const void *)&name, sizeof name));
	TRY(listen(listener, 16));
	accepting(listener, true, dial, &name);
}
