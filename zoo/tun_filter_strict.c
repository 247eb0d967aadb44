// area: network namespaces
// shows: --strict: a filter that is attached to a tap device is refused
// dump: --strict
// expect: refused "TUNATTACHFILTER"
// modes: ns
#include "zoo.h"
#include <linux/filter.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <sys/ioctl.h>

int main(void)
{
	struct ifreq request = { .ifr_name = "tap0", .ifr_flags = IFF_TAP | IFF_NO_PI };
	struct sock_filter none = BPF_STMT(BPF_RET, 0);
	struct sock_fprog program = { 1, &none };
	int fd = TRY(open("/dev/net/tun", O_RDWR | O_NONBLOCK));

	TRY(ioctl(fd, TUNSETIFF, &request));
	TRY(ioctl(fd, TUNATTACHFILTER, &program));
	zoo_ready();
	zoo_wait();
	zoo_pass();
}
