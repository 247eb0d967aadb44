// area: TCP
// shows: a connection of Multipath TCP is refused
// options: --tcp-established
// expect: refused "run the program without (GODEBUG=multipathtcp=0 for one built with Go)"
#include "zoo.h"
#include "tcp.h"

#ifndef IPPROTO_MPTCP
#define IPPROTO_MPTCP 262
#endif

int main(void)
{
	union tcp_name name;
	socklen_t len = tcp_loopback(&name, AF_INET, 0);
	int listener = socket(AF_INET, SOCK_STREAM, IPPROTO_MPTCP), client, server;

	if (listener < 0)
		zoo_skip("no Multipath TCP");
	TRY(bind(listener, &name.any, len));
	TRY(listen(listener, 8));
	TRY(getsockname(listener, &name.any, &len));
	client = TRY(socket(AF_INET, SOCK_STREAM, IPPROTO_MPTCP));
	TRY(connect(client, &name.any, len));
	server = TRY(accept(listener, NULL, NULL));
	zoo_ready();
	zoo_wait();
	tcp_talk(client, server);
	zoo_pass();
}
