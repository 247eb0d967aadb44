// area: other task state
// shows: the adjustment for the out-of-memory killer, and the filter for core dumps
// foreign: no CRIU's images do not have the filter for core dumps
#include "zoo.h"

static void put(const char *path, const char *text)
{
	int fd = TRY(open(path, O_WRONLY | O_CLOEXEC));

	CHECK_EQ(write(fd, text, strlen(text)), (ssize_t)strlen(text));
	TRY(close(fd));
}

int main(void)
{
	put("/proc/self/oom_score_adj", "437");
	put("/proc/self/coredump_filter", "0x55");
	zoo_ready();
	zoo_wait();
	CHECK_EQ(atoi(zoo_slurp("/proc/self/oom_score_adj")), 437);
	CHECK_EQ(strtol(zoo_slurp("/proc/self/coredump_filter"), NULL, 16), 0x55);
	zoo_pass();
}
