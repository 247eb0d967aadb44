// area: refusals
// shows: a network namespace with policies of IPsec, of a socket alone even, is refused by name
// modes: ns
// expect: refused "has policies of IPsec"
#include "zoo.h"
#include <linux/xfrm.h>
#include <netinet/in.h>
#include <sys/socket.h>

int main(void)
{
	int fd = TRY(socket(AF_INET, SOCK_DGRAM, 0));
	struct xfrm_userpolicy_info policy = {
		.dir = XFRM_POLICY_OUT,
		.action = XFRM_POLICY_ALLOW,
		.sel.family = AF_INET,
		.lft.hard_byte_limit = XFRM_INF,
		.lft.soft_byte_limit = XFRM_INF,
		.lft.hard_packet_limit = XFRM_INF,
		.lft.soft_packet_limit = XFRM_INF,
	};

	TRY(setsockopt(fd, IPPROTO_IP, IP_XFRM_POLICY, &policy, sizeof policy));
	zoo_ready();
	zoo_wait();
	zoo_pass();
}
