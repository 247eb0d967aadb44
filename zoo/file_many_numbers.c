// area: files
// shows: descriptors at all powers of two up to the limit, in shared and in separate tables
// foreign: yes
#include "zoo.h"
#include <sys/resource.h>

static unsigned top;
static char stack[65536];

static int verify(void *arg)
{
	if (arg)
		zoo_tell(arg);
	zoo_wait();
	for (unsigned fd = 4; fd < top; fd++) {
		bool power = (fd & (fd - 1)) == 0;

		CHECK_EQ(fcntl((int)fd, F_GETFD) >= 0, power);
	}
	return 0;
}

int main(void)
{
	struct rlimit limit;
	pid_t shared, own;
	int fd = TRY(open("/dev/null", O_RDWR));

	TRY(getrlimit(RLIMIT_NOFILE, &limit));
	top = limit.rlim_cur > 16384 ? 16384 : (unsigned)limit.rlim_cur;
	for (unsigned to = 4; to < top; to *= 2)
		TRY(dup2(fd, (int)to));
	if (fd != 4)
		close(fd);
	shared = TRY(clone(verify, stack + sizeof stack, CLONE_FILES | SIGCHLD, "shared"));
	own = TRY(clone(verify, stack + sizeof stack, SIGCHLD, "own"));
	zoo_await("shared");
	zoo_await("own");
	zoo_ready();
	verify(NULL);
	CHECK_EXIT(shared, 0);
	CHECK_EXIT(own, 0);
	zoo_pass();
}
