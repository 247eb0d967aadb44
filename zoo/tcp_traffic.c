// area: TCP
// shows: a connection with constant traffic at the moment of the dump
// foreign: yes
// options: --tcp-established
// varies: fd
#include "zoo.h"
#include "tcp.h"

#define BLOCK 8192

int main(void)
{
	uint64_t out[BLOCK / 8], in[BLOCK / 8];
	int server, client;
	pid_t child;

	tcp_pair(AF_INET, &server, &client);
	child = TRY(fork());
	if (child == 0) {
		TRY(close(client));
		for (;;) {
			ssize_t n = recv(server, in, BLOCK, MSG_WAITALL);

			if (n == 0)
				_exit(3);
			CHECK_EQ(n, BLOCK);
			CHECK_EQ(send(server, in, BLOCK, 0), BLOCK);
		}
	}
	TRY(close(server));
	for (uint64_t n = 0; n < 100 || !zoo_go(); n++) {
		zoo_fill(out, BLOCK, n);
		CHECK_EQ(send(client, out, BLOCK, 0), BLOCK);
		CHECK_EQ(recv(client, in, BLOCK, MSG_WAITALL), BLOCK);
		CHECK(memcmp(in, out, BLOCK) == 0);
		if (n == 50)
			zoo_ready();
	}
	TRY(close(client));
	CHECK_EXIT(child, 3);
	zoo_pass();
}
