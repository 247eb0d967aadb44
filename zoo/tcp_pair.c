// area: TCP
// shows: established connections inside of the tree, IPv4 and IPv6, their ends in different processes
// foreign: yes
// options: --tcp-established
#include "zoo.h"
#include "tcp.h"

int main(void)
{
	int families[] = { AF_INET, AF_INET6 }, servers[2], clients[2];
	char text[4];
	pid_t child;

	for (int i = 0; i < 2; i++)
		tcp_pair(families[i], &servers[i], &clients[i]);
	child = TRY(fork());
	if (child == 0) {
		for (int i = 0; i < 2; i++)
			TRY(close(clients[i]));
		zoo_tell("child");
		for (int i = 0; i < 2; i++) {
			while (recv(servers[i], text, 4, MSG_WAITALL) == 4)
				CHECK_EQ(send(servers[i], "pong", 4, 0), 4);
			TRY(close(servers[i]));
		}
		_exit(7);
	}
	for (int i = 0; i < 2; i++)
		TRY(close(servers[i]));
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 2; i++) {
		for (int round = 0; round < 20; round++) {
			CHECK_EQ(send(clients[i], "ping", 4, 0), 4);
			CHECK_EQ(recv(clients[i], text, 4, MSG_WAITALL), 4);
			CHECK(memcmp(text, "pong", 4) == 0);
		}
		TRY(close(clients[i]));
	}
	CHECK_EXIT(child, 7);
	zoo_pass();
}
