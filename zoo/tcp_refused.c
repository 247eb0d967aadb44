// area: TCP
// shows: an established connection is refused without --tcp-established
// expect: refused "tcp-established"
#include "zoo.h"
#include "tcp.h"

int main(void)
{
	int server, client;

	tcp_pair(AF_INET, &server, &client);
	zoo_ready();
	zoo_wait();
	tcp_talk(server, client);
	zoo_pass();
}
