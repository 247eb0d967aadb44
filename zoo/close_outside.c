// area: TCP
// shows: --close-outside: a connection between tasks of the tree stays, with what waits in it; one whose other end nobody has comes back closed
// dump: --close-outside
// restore: --tcp-established
// modes: ns userns
#include "zoo.h"
#include "tcp.h"

int main(void)
{
	int families[] = { AF_INET, AF_INET6 }, servers[2], clients[2], alone, gone;
	char text[4];
	pid_t child;

	for (int i = 0; i < 2; i++)
		tcp_pair(families[i], &servers[i], &clients[i]);
	tcp_pair(AF_INET, &gone, &alone);
	child = TRY(fork());
	if (child == 0) {
		for (int i = 0; i < 2; i++)
			TRY(close(clients[i]));
		TRY(close(gone));
		TRY(close(alone));
		zoo_tell("child");
		for (int i = 0; i < 2; i++) {
			while (recv(servers[i], text, 4, MSG_WAITALL) == 4)
				CHECK_EQ(send(servers[i], text, 4, 0), 4);
			TRY(close(servers[i]));
		}
		_exit(7);
	}
	for (int i = 0; i < 2; i++)
		TRY(close(servers[i]));
	TRY(close(gone));
	zoo_await("child");
	for (int i = 0; i < 2; i++)
		CHECK_EQ(send(clients[i], "kept", 4, 0), 4);
	CHECK_EQ(recv(alone, text, 1, 0), 0);
	CHECK_EQ(tcp_state(alone), TCP_CLOSE_WAIT);
	zoo_ready();
	zoo_wait();
	if (tcp_state(alone) == TCP_CLOSE_WAIT)
		zoo_pass(); /* There was no checkpoint. */
	CHECK_EQ(tcp_state(alone), TCP_CLOSE);
	for (int i = 0; i < 2; i++) {
		CHECK_EQ(recv(clients[i], text, 4, MSG_WAITALL), 4);
		CHECK(memcmp(text, "kept", 4) == 0);
		for (int round = 0; round < 20; round++) {
			CHECK_EQ(send(clients[i], "ping", 4, 0), 4);
			CHECK_EQ(recv(clients[i], text, 4, MSG_WAITALL), 4);
			CHECK(memcmp(text, "ping", 4) == 0);
		}
		TRY(close(clients[i]));
	}
	CHECK_EQ(TRY(waitpid(child, NULL, 0)), child);
	zoo_pass();
}
