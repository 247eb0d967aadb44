// area: packet and netlink sockets
// shows: a netlink socket with an answer that was not read yet is refused
// expect: refused "netlink"
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
	int fd = TRY(socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE));
	char answer[8192];

	CHECK_EQ(send(fd, &ask, sizeof ask, 0), sizeof ask);
	zoo_ready();
	zoo_wait();
	CHECK(recv(fd, answer, sizeof answer, 0) > 0);
	zoo_pass();
}
