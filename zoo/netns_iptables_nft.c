// area: network namespaces
// shows: rules of the iptables that writes nftables do what they did, and it reads and changes them
// modes: ns sealed
// files: /usr/sbin/iptables-nft /usr/lib/x86_64-linux-gnu/xtables/libxt_conntrack.so /usr/lib/x86_64-linux-gnu/xtables/libxt_standard.so /usr/lib/x86_64-linux-gnu/xtables/libxt_udp.so
// needs: /usr/sbin/iptables-nft /usr/sbin/nft
#include "firewall.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

/* Whether packets to this port are let through. */
static bool passes(int fd, uint16_t port)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(port),
				  .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };

	/* What came back for the one before is an error of this one. */
	while (sendto(fd, "x", 1, 0, (void *)&to, sizeof to) < 0) {
		if (errno == EPERM)
			return false;
		CHECK_EQ(errno, ECONNREFUSED);
	}
	return true;
}

int main(void)
{
	int fd = TRY(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));

	if (FIREWALL_RUN("/usr/sbin/iptables-nft", "-A", "OUTPUT", "-p", "udp", "--dport", "7", "-m", "conntrack",
			 "--ctstate", "NEW", "-j", "DROP"))
		zoo_skip("no iptables");
	CHECK(passes(fd, 9));
	CHECK(!passes(fd, 7));
	zoo_ready();
	zoo_wait();
	CHECK(passes(fd, 9));
	CHECK(!passes(fd, 7));
	CHECK_EQ(FIREWALL_RUN("/usr/sbin/iptables-nft", "-D", "OUTPUT", "-p", "udp", "--dport", "7", "-m", "conntrack",
			      "--ctstate", "NEW", "-j", "DROP"), 0);
	CHECK(passes(fd, 7));
	zoo_pass();
}
