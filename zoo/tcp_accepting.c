// area: TCP
// shows: a server with connections that wait to be accepted at nearly every moment: all of them are served
// foreign: yes
// options: --tcp-established
// modes: plain leave-running ns
// varies: fd
#include "accepting.h"
#include "tcp.h"

static int dial(const void *name)
{
	return tcp_dial(name);
}

int main(void)
{
	union tcp_name name;
	int listener = tcp_listen(AF_INET, &name);

	accepting(listener, false, dial, &name);
}
