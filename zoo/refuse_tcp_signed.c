// area: refusals
// shows: a TCP listener that takes signed segments only (TCP_MD5SIG) is refused by name
// modes: plain leave-running ns userns
// expect: refused "its segments are signed (TCP_MD5SIG)"
#include "zoo.h"
#include "tcp.h"
#include "signed.h"

int main(void)
{
	union tcp_name name;
	int listener = tcp_listen(AF_INET, &name), client = TRY(socket(AF_INET, SOCK_STREAM, 0)), server;

	signed_by(listener, &name);
	signed_by(client, &name);
	zoo_ready();
	zoo_wait();
	TRY(connect(client, &name.any, sizeof name.v4));
	server = TRY(accept(listener, NULL, NULL));
	tcp_talk(server, client);
	zoo_pass();
}
