// area: refusals
// shows: a TCP connection whose segments are signed (TCP_MD5SIG) is refused by name
// modes: plain leave-running ns userns
// options: --tcp-established
// expect: refused "its segments are signed (TCP_MD5SIG)"
#include "zoo.h"
#include "tcp.h"
#include "signed.h"

int main(void)
{
	union tcp_name name;
	int listener = tcp_listen(AF_INET6, &name), client = TRY(socket(AF_INET6, SOCK_STREAM, 0)), server;

	signed_by(listener, &name);
	signed_by(client, &name);
	TRY(connect(client, &name.any, sizeof name.v6));
	server = TRY(accept(listener, NULL, NULL));
	TRY(close(listener));
	zoo_ready();
	zoo_wait();
	tcp_talk(server, client);
	zoo_pass();
}
