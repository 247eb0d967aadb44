// area: TCP
// shows: a connection that nobody has accepted yet is refused without --skip-in-flight
// options: --tcp-established
// expect: refused "in-flight"
#include "zoo.h"
#include "tcp.h"

int main(void)
{
	union tcp_name name;
	int listener = tcp_listen(AF_INET, &name), client = tcp_dial(&name);

	zoo_ready();
	zoo_wait();
	tcp_talk(client, TRY(accept(listener, NULL, NULL)));
	zoo_pass();
}
