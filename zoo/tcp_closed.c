// area: TCP
// shows: fully closed sockets give end of file and EPIPE
// foreign: yes
// options: --tcp-established
#include "zoo.h"
#include "tcp.h"

int main(void)
{
	int families[] = { AF_INET, AF_INET6 }, fds[2];
	char c;

	signal(SIGPIPE, SIG_IGN);
	for (int i = 0; i < 2; i++)
		fds[i] = tcp_closed_by_both(families[i]);
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 2; i++) {
		CHECK_EQ(tcp_state(fds[i]), TCP_CLOSE);
		CHECK_EQ(recv(fds[i], &c, 1, 0), 0);
		CHECK(send(fds[i], "x", 1, 0) < 0 && errno == EPIPE);
	}
	zoo_pass();
}
