// area: file locks
// shows: a POSIX lock in a shared descriptor table is its taker's, and everybody's who shares it; an open file in flight keeps its lock
// foreign: yes
// options: --file-locks
#include "zoo.h"
#include "scm.h"
#include <sys/file.h>

static char stack[65536];
static int fd;

static int set(int op, short type, struct flock *fl)
{
	*fl = (struct flock){ .l_type = type, .l_whence = SEEK_SET, .l_start = 3, .l_len = 4 };
	return fcntl(fd, op, fl);
}

static int takes(void *arg)
{
	struct flock fl;

	TRY(set(F_SETLK, F_WRLCK, &fl));
	zoo_tell(arg);
	zoo_wait();
	zoo_await("seen");
	return 0;
}

int main(void)
{
	struct flock fl;
	pid_t taker, other;
	int ends[2], flocked = TRY(open("flocked", O_RDWR | O_CREAT, 0600)), second = TRY(open("flocked", O_RDWR));

	TRY(socketpair(AF_UNIX, SOCK_DGRAM, 0, ends));
	send_fd(ends[0], flocked);
	TRY(flock(flocked, LOCK_EX));
	fd = TRY(open("file", O_RDWR | O_CREAT, 0600));
	taker = TRY(clone(takes, stack + sizeof stack, CLONE_FILES | SIGCHLD, "taken"));
	zoo_await("taken");
	other = TRY(fork());
	if (other == 0) {
		zoo_tell("other");
		zoo_wait();
		TRY(set(F_GETLK, F_RDLCK, &fl));
		CHECK_EQ(fl.l_type, F_WRLCK);
		CHECK_EQ(fl.l_pid, taker);
		zoo_tell("seen");
		_exit(0);
	}
	zoo_await("other");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(other, 0);
	CHECK_EXIT(taker, 0);
	/* The table still has the lock, and this task can give it up. */
	TRY(set(F_SETLK, F_UNLCK, &fl));
	TRY(close(flocked));
	CHECK(flock(second, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK);
	TRY(flock(recv_fd(ends[1]), LOCK_UN));
	TRY(flock(second, LOCK_EX | LOCK_NB));
	zoo_pass();
}
