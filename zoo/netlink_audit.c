// area: packet and netlink sockets
// shows: a socket to the audit system as dbus-daemon has it, unused, and one that has asked something
// foreign: yes
// modes: plain leave-running pidns ns userns
#include "zoo.h"
#include <linux/audit.h>
#include <linux/netlink.h>
#include <sys/socket.h>

/* In a pid namespace the answer is that it may not ask. */
static int audit_ask(int fd)
{
	struct nlmsghdr ask = { sizeof ask, AUDIT_GET, NLM_F_REQUEST, 1, 0 };
	char answer[8192];

	CHECK_EQ(send(fd, &ask, sizeof ask, 0), sizeof ask);
	CHECK(recv(fd, answer, sizeof answer, 0) > 0);
	return ((struct nlmsghdr *)answer)->nlmsg_type;
}

int main(void)
{
	int fresh = TRY(socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_AUDIT));
	int asked = TRY(socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_AUDIT)), type;

	type = audit_ask(asked);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(audit_ask(fresh), type);
	CHECK_EQ(audit_ask(asked), type);
	zoo_pass();
}
