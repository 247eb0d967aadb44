// area: packet and netlink sockets
// shows: a netlink socket that a task without rights has made takes no orders, whoever sends them
// foreign: yes
// modes: plain pidns ns
#include "zoo.h"
#include "scm.h"
#include <grp.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>

/* What the kernel answers to an order without a meaning: it looks first whether one may give any. */
static int order(int fd)
{
	struct {
		struct nlmsghdr head;
		struct ifinfomsg link;
	} ask = { { sizeof ask, RTM_SETLINK, NLM_F_REQUEST | NLM_F_ACK, 1, 0 }, { .ifi_family = AF_UNSPEC } };
	struct {
		struct nlmsghdr head;
		struct nlmsgerr error;
		char more[512];
	} answer;

	CHECK_EQ(send(fd, &ask, sizeof ask, 0), sizeof ask);
	CHECK(recv(fd, &answer, sizeof answer, 0) > 0);
	CHECK_EQ(answer.head.nlmsg_type, NLMSG_ERROR);
	return answer.error.error;
}

int main(void)
{
	int pair[2], own, theirs;
	pid_t child;

	TRY(chmod(".", 0777));
	TRY(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
	child = TRY(fork());
	if (child == 0) {
		TRY(setgroups(0, NULL));
		TRY(setresgid(1000, 1000, 1000));
		TRY(setresuid(1000, 1000, 1000));
		theirs = TRY(socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE));
		zoo_tell("child");
		zoo_wait();
		send_fd(pair[1], theirs);
		_exit(0);
	}
	own = TRY(socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE));
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	theirs = recv_fd(pair[0]);
	CHECK_EQ(order(own), -EINVAL);
	CHECK_EQ(order(theirs), -EPERM);
	CHECK_EXIT(child, 0);
	zoo_pass();
}
