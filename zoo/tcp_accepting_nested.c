// area: TCP
// shows: busy servers in two networks of the tree, neither of which is the first task's: all connections are served
// options: --tcp-established
// modes: ns
// varies: fd
#include "accepting.h"
#include "tcp.h"
#include <net/if.h>
#include <sys/ioctl.h>

static int dial(const void *name)
{
	return tcp_dial(name);
}

/* Serves and asks in a network of its own; ends with the verdict. */
static void serve(void)
{
	struct ifreq loopback = { .ifr_name = "lo" };
	union tcp_name name;
	int fd;

	TRY(unshare(CLONE_NEWNET));
	fd = TRY(socket(AF_INET, SOCK_DGRAM, 0));
	TRY(ioctl(fd, SIOCGIFFLAGS, &loopback));
	loopback.ifr_flags |= IFF_UP;
	TRY(ioctl(fd, SIOCSIFFLAGS, &loopback));
	TRY(close(fd));
	accepting(tcp_listen(AF_INET, &name), false, dial, &name);
}

int main(void)
{
	pid_t pids[2];

	for (int i = 0; i < 2; i++) {
		pids[i] = TRY(fork());
		if (!pids[i])
			serve();
	}
	for (int i = 0; i < 2; i++)
		CHECK_EXIT(pids[i], 0);
	zoo_pass();
}
