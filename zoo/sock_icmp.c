// area: UDP and raw sockets
// shows: ping sockets and raw sockets, with header inclusion and ICMP filters
// foreign: yes
// modes: plain leave-running pidns ns
#include "zoo.h"
#include "tcp.h"
#include <linux/icmp.h>

int main(void)
{
	struct icmp_filter filter = { 0x55 }, got;
	int ping, raw, header;
	union tcp_name name;
	struct icmphdr echo = { .type = ICMP_ECHO };
	char answer[256];
	socklen_t len = sizeof got;
	int fd = TRY(open("/proc/sys/net/ipv4/ping_group_range", O_WRONLY | O_CLOEXEC));

	CHECK(write(fd, "0 65535", 7) == 7);
	TRY(close(fd));
	ping = TRY(socket(AF_INET, SOCK_DGRAM, IPPROTO_ICMP));
	raw = TRY(socket(AF_INET, SOCK_RAW, IPPROTO_ICMP));
	TRY(setsockopt(raw, SOL_RAW, ICMP_FILTER, &filter, sizeof filter));
	header = TRY(socket(AF_INET, SOCK_RAW, IPPROTO_RAW));
	tcp_loopback(&name, AF_INET, 0);
	TRY(connect(ping, &name.any, sizeof name.v4));
	zoo_ready();
	zoo_wait();
	TRY(getsockopt(raw, SOL_RAW, ICMP_FILTER, &got, &len));
	CHECK_EQ(got.data, 0x55);
	CHECK_EQ(sock_option(header, IPPROTO_IP, IP_HDRINCL), 1);
	CHECK_EQ(send(ping, &echo, sizeof echo, 0), sizeof echo);
	CHECK_EQ(recv(ping, answer, sizeof answer, 0), sizeof echo);
	CHECK_EQ(((struct icmphdr *)answer)->type, ICMP_ECHOREPLY);
	zoo_pass();
}
