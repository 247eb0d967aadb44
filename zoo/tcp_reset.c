// area: TCP
// shows: a connection that was reset while bytes were unread
// foreign: yes
// options: --tcp-established
#include "zoo.h"
#include "tcp.h"

int main(void)
{
	struct linger hard = { 1, 0 };
	int server, client;
	char c;

	signal(SIGPIPE, SIG_IGN);
	tcp_pair(AF_INET, &server, &client);
	TRY(setsockopt(server, SOL_SOCKET, SO_LINGER, &hard, sizeof hard));
	TRY(close(server));
	WAIT_UNTIL(tcp_state(client) == TCP_CLOSE);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(tcp_state(client), TCP_CLOSE);
	CHECK(recv(client, &c, 1, 0) <= 0);
	CHECK(send(client, "x", 1, 0) < 0 && (errno == EPIPE || errno == ECONNRESET));
	zoo_pass();
}
