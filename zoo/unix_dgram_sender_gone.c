// area: Unix sockets
// shows: a datagram whose sender is gone; the bound socket stays open to new senders
// foreign: yes
#include "zoo.h"
#include <sys/socket.h>
#include <sys/un.h>

int main(void)
{
	struct sockaddr_un name = { AF_UNIX, "dgram" };
	int fd = TRY(socket(AF_UNIX, SOCK_DGRAM, 0)), sender;
	char text[16];

	TRY(bind(fd, (void *)&name, sizeof name));
	sender = TRY(socket(AF_UNIX, SOCK_DGRAM, 0));
	CHECK_EQ(sendto(sender, "legacy", 6, 0, (void *)&name, sizeof name), 6);
	TRY(close(sender));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(read(fd, text, sizeof text), 6);
	CHECK(memcmp(text, "legacy", 6) == 0);
	sender = TRY(socket(AF_UNIX, SOCK_DGRAM, 0));
	TRY(connect(sender, (void *)&name, sizeof name));
	CHECK_EQ(write(sender, "new", 3), 3);
	CHECK_EQ(read(fd, text, sizeof text), 3);
	zoo_pass();
}
