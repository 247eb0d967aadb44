// area: network namespaces
// shows: loopback up with further addresses and routes
// modes: ns userns
#include "zoo.h"
#include "tcp.h"
#include <linux/rtnetlink.h>
#include <net/if.h>

static void add_address(int family, const void *address, int len, int prefix)
{
	struct {
		struct nlmsghdr head;
		struct ifaddrmsg msg;
		char attrs[128];
	} ask = { { NLMSG_LENGTH(sizeof(struct ifaddrmsg)), RTM_NEWADDR, NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE, 1, 0 },
		  { (unsigned char)family, (unsigned char)prefix, 0, 0, 1 }, { 0 } };
	struct {
		struct nlmsghdr head;
		struct nlmsgerr error;
	} answer;
	int fd = TRY(socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE)), kinds[] = { IFA_LOCAL, IFA_ADDRESS };

	for (int i = 0; i < 2; i++) {
		struct rtattr *attr = (void *)((char *)&ask + NLMSG_ALIGN(ask.head.nlmsg_len));

		attr->rta_type = (unsigned short)kinds[i];
		attr->rta_len = (unsigned short)RTA_LENGTH(len);
		memcpy(RTA_DATA(attr), address, len);
		ask.head.nlmsg_len = NLMSG_ALIGN(ask.head.nlmsg_len) + RTA_ALIGN(attr->rta_len);
	}
	CHECK(send(fd, &ask, ask.head.nlmsg_len, 0) > 0);
	CHECK(recv(fd, &answer, sizeof answer, 0) > 0);
	CHECK_EQ(answer.error.error, 0);
	TRY(close(fd));
}

static bool can_bind_to(int family, const char *text)
{
	union tcp_name name;
	int fd = TRY(socket(family, SOCK_DGRAM, 0));
	socklen_t len = tcp_loopback(&name, family, 0);
	bool can;

	CHECK_EQ(inet_pton(family, text, family == AF_INET ? (void *)&name.v4.sin_addr : (void *)&name.v6.sin6_addr), 1);
	can = bind(fd, &name.any, len) == 0;
	CHECK(can || errno == EADDRNOTAVAIL);
	TRY(close(fd));
	return can;
}

int main(void)
{
	struct in6_addr v6;
	struct in_addr v4;
	char routes[4096];

	CHECK_EQ(inet_pton(AF_INET, "10.77.0.1", &v4), 1);
	CHECK_EQ(inet_pton(AF_INET6, "fd00:77::1", &v6), 1);
	add_address(AF_INET, &v4, 4, 24);
	add_address(AF_INET6, &v6, 16, 64);
	// The kernel makes IPv6 addresses usable in a work item of its own, on loopback, too.
	for (int tries = 0; !can_bind_to(AF_INET6, "fd00:77::1"); tries++) {
		CHECK(tries < 10000);
		usleep(1000);
	}
	snprintf(routes, sizeof routes, "%.4000s", zoo_slurp("/proc/net/fib_trie"));
	zoo_ready();
	zoo_wait();
	CHECK(strcmp(routes, zoo_slurp("/proc/net/fib_trie")) == 0);
	CHECK(can_bind_to(AF_INET, "10.77.0.1"));
	CHECK(can_bind_to(AF_INET6, "fd00:77::1"));
	CHECK(can_bind_to(AF_INET, "127.0.0.1"));
	zoo_pass();
}
