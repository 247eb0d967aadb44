// area: TCP
// shows: half closed connections: FIN_WAIT2 and CLOSE_WAIT, with data under way
// foreign: yes
// options: --tcp-established
#include "zoo.h"
#include "tcp.h"

int main(void)
{
	int server, client;
	char text[16];

	tcp_pair(AF_INET, &server, &client);
	CHECK_EQ(send(client, "last words", 10, 0), 10);
	TRY(shutdown(client, SHUT_WR));
	CHECK_EQ(send(server, "early", 5, 0), 5);
	WAIT_UNTIL(tcp_state(client) == TCP_FIN_WAIT2 && tcp_state(server) == TCP_CLOSE_WAIT);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(tcp_state(client), TCP_FIN_WAIT2);
	CHECK_EQ(tcp_state(server), TCP_CLOSE_WAIT);
	CHECK_EQ(recv(server, text, 10, MSG_WAITALL), 10);
	CHECK(memcmp(text, "last words", 10) == 0);
	CHECK_EQ(recv(server, text, 1, 0), 0);
	CHECK_EQ(send(server, "answer", 6, 0), 6);
	TRY(close(server));
	CHECK_EQ(recv(client, text, 16, MSG_WAITALL), 11);
	CHECK(memcmp(text, "earlyanswer", 11) == 0);
	zoo_pass();
}
