// area: files
// shows: descriptors on /proc of a process that is gone
// foreign: yes
// options: --link-remap
#include "zoo.h"

int main(void)
{
	char path[64], text[16];
	int dir, file;
	pid_t child = TRY(fork());

	if (child == 0) {
		pause();
		_exit(0);
	}
	snprintf(path, sizeof path, "/proc/%d", child);
	dir = TRY(open(path, O_RDONLY | O_DIRECTORY));
	snprintf(path, sizeof path, "/proc/%d/mountinfo", child);
	file = TRY(open(path, O_RDONLY));
	TRY(kill(child, SIGKILL));
	zoo_reap(child);
	zoo_ready();
	zoo_wait();
	CHECK(openat(dir, "stat", O_RDONLY) < 0 && (errno == ESRCH || errno == ENOENT));
	/* What was opened before the death may still be readable, or be gone. */
	CHECK(read(file, text, sizeof text) >= 0 || errno == ESRCH || errno == EINVAL);
	zoo_pass();
}
