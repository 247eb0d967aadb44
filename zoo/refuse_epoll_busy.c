// area: refusals
// shows: an epoll set that polls network devices (EPIOCSPARAMS) is refused with --strict
// modes: plain leave-running ns userns
// dump: --strict
// expect: refused "how it polls network devices (EPIOCSPARAMS) is not kept"
#include "zoo.h"
#include <sys/epoll.h>
#include <sys/ioctl.h>

/* Newer than the libraries of some. */
struct busy_params {
	uint32_t usecs;
	uint16_t budget;
	uint8_t prefer, pad;
};
#define SET_PARAMS _IOW(0x8A, 0x01, struct busy_params)
#define GET_PARAMS _IOR(0x8A, 0x02, struct busy_params)

int main(void)
{
	struct busy_params params = { .usecs = 50, .budget = 8 };
	int set = TRY(epoll_create1(0));

	TRY(ioctl(set, SET_PARAMS, &params));
	zoo_ready();
	zoo_wait();
	memset(&params, 0, sizeof params);
	TRY(ioctl(set, GET_PARAMS, &params));
	CHECK_EQ(params.usecs, 50);
	zoo_pass();
}
