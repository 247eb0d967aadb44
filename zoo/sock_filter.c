// area: UDP and raw sockets
// shows: a classic socket filter is returned unchanged and still filters
// foreign: yes
#include "zoo.h"
#include "tcp.h"
#include <linux/filter.h>

int main(void)
{
	/* Accepts datagrams whose first byte after the UDP header is 'a'. */
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_B | BPF_ABS, 8),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 'a', 0, 1),
		BPF_STMT(BPF_RET | BPF_K, 0xffff),
		BPF_STMT(BPF_RET | BPF_K, 0),
	}, got[8];
	struct sock_fprog prog = { 4, code };
	union tcp_name name;
	int fd = TRY(socket(AF_INET, SOCK_DGRAM, 0));
	socklen_t len = tcp_loopback(&name, AF_INET, 0), count = 8;
	char c;

	TRY(bind(fd, &name.any, len));
	TRY(getsockname(fd, &name.any, &len));
	TRY(setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &prog, sizeof prog));
	zoo_ready();
	zoo_wait();
	TRY(getsockopt(fd, SOL_SOCKET, SO_GET_FILTER, got, &count));
	CHECK_EQ(count, 4);
	CHECK(memcmp(got, code, sizeof code) == 0);
	CHECK_EQ(sendto(fd, "b", 1, 0, &name.any, len), 1);
	CHECK_EQ(sendto(fd, "a", 1, 0, &name.any, len), 1);
	CHECK_EQ(recv(fd, &c, 1, 0), 1);
	CHECK_EQ(c, 'a');
	zoo_pass();
}
