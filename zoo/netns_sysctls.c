// area: network namespaces
// shows: sysctls of a network namespace: IPv4 and IPv6 per device, Unix queue length, ping range
// modes: ns
#include "zoo.h"

static const char *settings[][2] = {
	{ "/proc/sys/net/ipv4/conf/all/rp_filter", "2" },
	{ "/proc/sys/net/ipv4/conf/default/log_martians", "1" },
	{ "/proc/sys/net/ipv4/conf/lo/forwarding", "1" },
	{ "/proc/sys/net/ipv4/conf/lo/tag", "42" },
	{ "/proc/sys/net/ipv4/conf/lo/arp_ignore", "3" },
	{ "/proc/sys/net/ipv6/conf/lo/hop_limit", "55" },
	{ "/proc/sys/net/ipv6/conf/default/forwarding", "1" },
	{ "/proc/sys/net/ipv6/conf/all/accept_redirects", "0" },
	{ "/proc/sys/net/ipv6/conf/lo/mtu", "1400" },
	{ "/proc/sys/net/unix/max_dgram_qlen", "77" },
	{ "/proc/sys/net/ipv4/ping_group_range", "5\t500" },
};

int main(void)
{
	enum { N = sizeof settings / sizeof *settings };
	char text[16] = "";
	int queue;

	for (int i = 0; i < N; i++) {
		int fd = TRY(open(settings[i][0], O_WRONLY));

		CHECK(write(fd, settings[i][1], strlen(settings[i][1])) > 0);
		TRY(close(fd));
	}
	queue = TRY(open("/proc/sys/net/unix/max_dgram_qlen", O_RDONLY));
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < N; i++)
		if (strncmp(zoo_slurp(settings[i][0]), settings[i][1], strlen(settings[i][1])))
			zoo_fail("%s is %s", settings[i][0], zoo_slurp(settings[i][0]));
	CHECK(pread(queue, text, sizeof text - 1, 0) > 0);
	CHECK_EQ(atoi(text), 77);
	zoo_pass();
}
