// area: TCP
// shows: connections that wait in a listener's queue, when both ends are in the tree
// dump: --tcp-established --skip-in-flight
// restore: --tcp-established
// modes: plain pidns ns userns
// varies: fd
// foreign: yes
#include "zoo.h"
#include "tcp.h"

int main(void)
{
	union tcp_name name;
	int listener = tcp_listen(AF_INET, &name), client = tcp_dial(&name), again, server;

	zoo_ready();
	zoo_wait();
	/* --skip-in-flight gives the connection up: its client learns so sooner or later. */
	(void)client;
	TRY(fcntl(listener, F_SETFL, O_NONBLOCK));
	while (accept(listener, NULL, NULL) >= 0)
		;
	TRY(fcntl(listener, F_SETFL, 0));
	again = tcp_dial(&name);
	server = TRY(accept(listener, NULL, NULL));
	tcp_talk(again, server);
	zoo_pass();
}
