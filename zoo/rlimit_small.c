// area: other task state
// shows: limits below what the task already uses: files, file size, data, stack
// foreign: yes
#include "zoo.h"
#include <sys/resource.h>

int main(void)
{
	struct rlimit files = { 5, 20 }, size = { 0, 1 << 20 }, data = { 1 << 20, RLIM_INFINITY }, now;
	int fd = TRY(dup2(TRY(open("/dev/null", O_RDWR)), 15));

	signal(SIGXFSZ, SIG_IGN);
	TRY(setrlimit(RLIMIT_NOFILE, &files));
	TRY(setrlimit(RLIMIT_DATA, &data));
	zoo_ready();
	TRY(setrlimit(RLIMIT_FSIZE, &size));
	zoo_wait();
	TRY(getrlimit(RLIMIT_NOFILE, &now));
	CHECK_EQ(now.rlim_cur, 5);
	CHECK_EQ(now.rlim_max, 20);
	CHECK_EQ(write(fd, "x", 1), 1);
	TRY(getrlimit(RLIMIT_FSIZE, &now));
	CHECK_EQ(now.rlim_cur, 0);
	size.rlim_cur = 1 << 20;
	TRY(setrlimit(RLIMIT_FSIZE, &size));
	files.rlim_cur = 20;
	TRY(setrlimit(RLIMIT_NOFILE, &files));
	zoo_pass();
}
