// area: files
// shows: descriptors on files of /proc: of a child, of oneself, of a namespace
// foreign: yes
// varies: fd
#include "zoo.h"

int main(void)
{
	char path[64], text[256], link[64], other[64];
	int stat_fd, self, ns;
	ssize_t n;
	pid_t child = TRY(fork());

	if (child == 0) {
		zoo_wait();
		zoo_await("read");
		_exit(0);
	}
	snprintf(path, sizeof path, "/proc/%d/stat", child);
	stat_fd = TRY(open(path, O_RDONLY));
	self = TRY(open("/proc/self/status", O_RDONLY));
	ns = TRY(open("/proc/self/ns/net", O_RDONLY));
	zoo_ready();
	zoo_wait();
	n = TRY(read(stat_fd, text, sizeof text - 1));
	text[n] = 0;
	CHECK_EQ(atoi(text), child);
	CHECK(read(self, text, 5) == 5 && memcmp(text, "Name:", 5) == 0);
	snprintf(path, sizeof path, "/proc/self/fd/%d", ns);
	n = TRY(readlink(path, link, sizeof link));
	CHECK_EQ(readlink("/proc/self/ns/net", other, sizeof other), n);
	CHECK(memcmp(link, other, n) == 0);
	zoo_tell("read");
	CHECK_EXIT(child, 0);
	zoo_pass();
}
