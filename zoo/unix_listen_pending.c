// area: Unix sockets
// shows: connections that wait in a listener's queue are accepted after the restore
// foreign: yes
#include "zoo.h"
#include <sys/socket.h>
#include <sys/un.h>

int main(void)
{
	struct sockaddr_un name = { AF_UNIX, "listener" };
	int types[] = { SOCK_STREAM, SOCK_SEQPACKET }, listeners[2], clients[2][2];
	struct ucred peer;
	socklen_t len;
	char text[8];

	for (int t = 0; t < 2; t++) {
		name.sun_path[8] = (char)('0' + t);
		listeners[t] = TRY(socket(AF_UNIX, types[t], 0));
		TRY(bind(listeners[t], (void *)&name, sizeof name));
		TRY(listen(listeners[t], 5));
		for (int i = 0; i < 2; i++) {
			clients[t][i] = TRY(socket(AF_UNIX, types[t], 0));
			TRY(connect(clients[t][i], (void *)&name, sizeof name));
		}
	}
	zoo_ready();
	zoo_wait();
	for (int t = 0; t < 2; t++)
		for (int i = 0; i < 2; i++) {
			int server = TRY(accept(listeners[t], NULL, NULL));

			len = sizeof peer;
			TRY(getsockopt(server, SOL_SOCKET, SO_PEERCRED, &peer, &len));
			CHECK_EQ(peer.pid, getpid());
			CHECK_EQ(write(clients[t][i], "hello", i + 3), i + 3);
			CHECK_EQ(read(server, text, 8), i + 3);
			CHECK_EQ(write(server, "x", 1), 1);
			CHECK_EQ(read(clients[t][i], text, 1), 1);
		}
	zoo_pass();
}
