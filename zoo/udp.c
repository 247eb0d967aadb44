// area: UDP and raw sockets
// shows: bound and connected UDP and UDP-Lite sockets exchange messages with the right addresses
// foreign: yes
#include "zoo.h"
#include "tcp.h"

int main(void)
{
	int families[] = { AF_INET, AF_INET6, AF_INET }, protocols[] = { IPPROTO_UDP, IPPROTO_UDP, IPPROTO_UDPLITE };
	union tcp_name names[3][2], from;
	int fds[3][2];
	bool have[3];
	char text[8];

	for (int f = 0; f < 3; f++) {
		socklen_t len = tcp_loopback(&names[f][0], families[f], 0);

		have[f] = true;
		for (int i = 0; i < 2; i++) {
			fds[f][i] = socket(families[f], SOCK_DGRAM, protocols[f]);
			if (fds[f][i] < 0) {
				CHECK(protocols[f] == IPPROTO_UDPLITE);
				have[f] = false;
				break;
			}
			tcp_loopback(&names[f][i], families[f], 0);
			TRY(bind(fds[f][i], &names[f][i].any, len));
			TRY(getsockname(fds[f][i], &names[f][i].any, &len));
		}
		if (have[f])
			TRY(connect(fds[f][1], &names[f][0].any, len));
	}
	zoo_ready();
	zoo_wait();
	for (int f = 0; f < 3; f++) {
		socklen_t len = sizeof from;

		if (!have[f])
			continue;
		CHECK_EQ(send(fds[f][1], "ping", 4, 0), 4);
		CHECK_EQ(recvfrom(fds[f][0], text, 8, 0, &from.any, &len), 4);
		CHECK_EQ(from.v4.sin_port, names[f][1].v4.sin_port);
		CHECK_EQ(sendto(fds[f][0], "pong!", 5, 0, &from.any, len), 5);
		CHECK_EQ(recv(fds[f][1], text, 8, 0), 5);
	}
	zoo_pass();
}
