// area: refusals
// shows: settings of a network namespace that are not kept are refused with --strict
// modes: ns
// dump: --strict
// expect: refused "what its network is set to by sysctl (net.core.somaxconn, net.ipv4.ip_unprivileged_port_start)"
#include "zoo.h"

static void set(const char *name, const char *value)
{
	int fd = TRY(open(name, O_WRONLY | O_CLOEXEC));

	CHECK_EQ(write(fd, value, strlen(value)), (ssize_t)strlen(value));
	TRY(close(fd));
}

int main(void)
{
	set("/proc/sys/net/core/somaxconn", "99");
	set("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0");
	zoo_ready();
	zoo_wait();
	zoo_pass();
}
