// area: refusals
// shows: a descriptor of a kind that is not known is refused by name
// modes: plain leave-running
// expect: refused "perf_event"
#include "zoo.h"
#include <linux/perf_event.h>

int main(void)
{
	struct perf_event_attr attr = { .type = PERF_TYPE_SOFTWARE, .size = sizeof attr, .config = PERF_COUNT_SW_TASK_CLOCK };
	int fd = (int)syscall(SYS_perf_event_open, &attr, 0, -1, -1, 0);

	if (fd < 0)
		zoo_skip("no perf events");
	zoo_ready();
	zoo_wait();
	CHECK(fcntl(fd, F_GETFD) >= 0);
	zoo_pass();
}
