// area: other task state
// shows: all resource limits
// foreign: yes
#include "zoo.h"
#include <sys/resource.h>

int main(void)
{
	struct rlimit limits[RLIM_NLIMITS], now;

	for (int i = 0; i < RLIM_NLIMITS; i++) {
		TRY(getrlimit(i, &limits[i]));
		if (limits[i].rlim_cur == RLIM_INFINITY)
			limits[i].rlim_cur = 1ul << 50;
		else if (limits[i].rlim_cur > 0)
			limits[i].rlim_cur--;
		if (limits[i].rlim_cur > limits[i].rlim_max)
			limits[i].rlim_cur = limits[i].rlim_max;
		TRY(setrlimit(i, &limits[i]));
	}
	limits[RLIMIT_NOFILE].rlim_max = limits[RLIMIT_NOFILE].rlim_cur = 500;
	TRY(setrlimit(RLIMIT_NOFILE, &limits[RLIMIT_NOFILE]));
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < RLIM_NLIMITS; i++) {
		TRY(getrlimit(i, &now));
		CHECK_EQ(now.rlim_cur, limits[i].rlim_cur);
		CHECK_EQ(now.rlim_max, limits[i].rlim_max);
	}
	zoo_pass();
}
