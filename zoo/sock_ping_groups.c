// area: UDP and raw sockets
// shows: ping sockets of a user namespace, which only groups of its network namespace may have
// modes: ns userns
#include "zoo.h"
#include "tcp.h"
#include <linux/icmp.h>

int main(void)
{
	struct icmphdr echo = { .type = ICMP_ECHO };
	union tcp_name name;
	char answer[256];
	int ping, fd = TRY(open("/proc/sys/net/ipv4/ping_group_range", O_WRONLY | O_CLOEXEC));

	CHECK(write(fd, "0 0", 3) == 3);
	TRY(close(fd));
	ping = TRY(socket(AF_INET, SOCK_DGRAM, IPPROTO_ICMP));
	tcp_loopback(&name, AF_INET, 0);
	TRY(connect(ping, &name.any, sizeof name.v4));
	/* Nobody may make another one. */
	fd = TRY(open("/proc/sys/net/ipv4/ping_group_range", O_WRONLY | O_CLOEXEC));
	CHECK(write(fd, "1 0", 3) == 3);
	TRY(close(fd));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(send(ping, &echo, sizeof echo, 0), sizeof echo);
	CHECK_EQ(recv(ping, answer, sizeof answer, 0), sizeof echo);
	CHECK_EQ(((struct icmphdr *)answer)->type, ICMP_ECHOREPLY);
	CHECK(socket(AF_INET, SOCK_DGRAM, IPPROTO_ICMP) < 0 && errno == EACCES);
	zoo_pass();
}
