// area: refusals
// shows: a request for an automatic mount (autofs) that its daemon has not read is refused by name
// modes: pidns ns
// expect: refused "that its daemon has not heard of yet"
#include "zoo.h"
#include "autofs.h"
#include <poll.h>

int main(void)
{
	union autofs_v5_packet_union asked;
	int fds[2], status;
	pid_t child;

	autofs_awaited(fds, &child);
	CHECK_EQ(poll(&(struct pollfd){ .fd = fds[0], .events = POLLIN }, 1, -1), 1);
	/* Who waits can be killed; the request stays. */
	TRY(kill(child, SIGKILL));
	CHECK_EQ(waitpid(child, &status, 0), child);
	zoo_ready();
	zoo_wait();
	autofs_read(fds[0], &asked);
	CHECK(!strcmp(asked.v5_packet.name, "key"));
	zoo_pass();
}
