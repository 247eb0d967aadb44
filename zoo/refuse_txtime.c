// area: refusals
// shows: a socket whose packets are sent at times of their own (SO_TXTIME) is refused with --strict
// modes: plain leave-running ns userns
// dump: --strict
// expect: refused "when its packets are to be sent (SO_TXTIME) is not kept"
#include "zoo.h"
#include <linux/net_tstamp.h>
#include <sys/socket.h>

int main(void)
{
	int fd = TRY(socket(AF_INET, SOCK_DGRAM, 0));
	struct sock_txtime times = { .clockid = CLOCK_MONOTONIC };
	socklen_t len = sizeof times;

	TRY(setsockopt(fd, SOL_SOCKET, SO_TXTIME, &times, len));
	zoo_ready();
	zoo_wait();
	memset(&times, 0, sizeof times);
	TRY(getsockopt(fd, SOL_SOCKET, SO_TXTIME, &times, &len));
	CHECK_EQ(times.clockid, CLOCK_MONOTONIC);
	zoo_pass();
}
