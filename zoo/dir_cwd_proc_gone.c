// area: directories
// shows: a working directory below a process in /proc that has ended
// modes: pidns ns userns
#include "zoo.h"

int main(void)
{
	pid_t child = TRY(fork());
	char path[64];

	if (child == 0) {
		for (;;)
			pause();
	}
	snprintf(path, sizeof path, "/proc/%d/task", child);
	TRY(chdir(path));
	TRY(kill(child, SIGKILL));
	zoo_reap(child);
	zoo_ready();
	zoo_wait();
	CHECK(open("stat", O_RDONLY) < 0 && (errno == ENOENT || errno == ESRCH));
	CHECK(chdir(".") < 0);
	TRY(chdir("/proc/self"));
	zoo_pass();
}
