// area: TCP
// shows: --tcp-close: established connections come back closed, a listener still works
// dump: --tcp-established
// restore: --tcp-close
// modes: plain pidns ns userns
// varies: fd
// foreign: yes
#include "zoo.h"
#include "tcp.h"
#include <poll.h>

int main(void)
{
	union tcp_name name;
	int listener = tcp_listen(AF_INET, &name), client = tcp_dial(&name), server = TRY(accept(listener, NULL, NULL));
	struct pollfd pfd = { .fd = client, .events = POLLIN };
	char c;

	signal(SIGPIPE, SIG_IGN);
	zoo_ready();
	zoo_wait();
	if (tcp_state(client) == TCP_ESTABLISHED)
		zoo_pass(); /* There was no checkpoint. */
	CHECK_EQ(tcp_state(client), TCP_CLOSE);
	CHECK_EQ(tcp_state(server), TCP_CLOSE);
	CHECK_EQ(recv(client, &c, 1, 0), 0);
	CHECK_EQ(poll(&pfd, 1, 0), 1);
	CHECK(pfd.revents & POLLHUP);
	CHECK(send(client, "x", 1, 0) < 0 && errno == EPIPE);
	TRY(fcntl(listener, F_SETFL, O_NONBLOCK));
	CHECK(accept(listener, NULL, NULL) < 0 && errno == EAGAIN);
	client = tcp_dial(&name);
	tcp_talk(client, TRY(accept(listener, NULL, NULL)));
	zoo_pass();
}
