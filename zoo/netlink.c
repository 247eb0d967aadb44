// area: packet and netlink sockets
// shows: netlink sockets: bound by number, by group, unbound; a request after the restore is answered
// foreign: yes
#include "zoo.h"
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <sys/socket.h>

int main(void)
{
	struct {
		struct nlmsghdr head;
		struct rtgenmsg gen;
	} ask = { { sizeof ask, RTM_GETLINK, NLM_F_REQUEST | NLM_F_DUMP, 1, 0 }, { AF_UNSPEC } };
	int route = TRY(socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE)), fresh;
	int uevent = TRY(socket(AF_NETLINK, SOCK_DGRAM | SOCK_NONBLOCK, NETLINK_KOBJECT_UEVENT));
	struct sockaddr_nl name = { .nl_family = AF_NETLINK, .nl_pid = getpid() + 1000 }, got;
	struct sockaddr_nl groups = { .nl_family = AF_NETLINK, .nl_groups = 1 };
	socklen_t len = sizeof got;
	char answer[8192];

	TRY(bind(route, (void *)&name, sizeof name));
	TRY(bind(uevent, (void *)&groups, sizeof groups));
	fresh = TRY(socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE));
	zoo_ready();
	zoo_wait();
	TRY(getsockname(route, (void *)&got, &len));
	CHECK_EQ(got.nl_pid, name.nl_pid);
	TRY(getsockname(uevent, (void *)&got, &len));
	CHECK_EQ(got.nl_groups, 1);
	CHECK_EQ(send(route, &ask, sizeof ask, 0), sizeof ask);
	CHECK(recv(route, answer, sizeof answer, 0) > 0);
	CHECK_EQ(((struct nlmsghdr *)answer)->nlmsg_type, RTM_NEWLINK);
	CHECK_EQ(send(fresh, &ask, sizeof ask, 0), sizeof ask);
	CHECK(recv(fresh, answer, sizeof answer, 0) > 0);
	zoo_pass();
}
