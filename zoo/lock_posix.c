// area: file locks
// shows: POSIX read and write locks on parts of a file stay those of their owner
// foreign: yes
// options: --file-locks
#include "zoo.h"

static struct flock probe(int fd, short type, off_t start, off_t len)
{
	struct flock fl = { .l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = len };

	TRY(fcntl(fd, F_GETLK, &fl));
	return fl;
}

static void lock(int fd, short type, off_t start, off_t len)
{
	struct flock fl = { .l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = len };

	TRY(fcntl(fd, F_SETLK, &fl));
}

int main(void)
{
	int fd = TRY(open("file", O_RDWR | O_CREAT, 0600));
	pid_t child, parent = getpid();

	CHECK_EQ(write(fd, "0123456789", 10), 10);
	lock(fd, F_WRLCK, 0, 5);
	lock(fd, F_RDLCK, 10, 10);
	lock(fd, F_WRLCK, 100, 0);
	child = TRY(fork());
	if (child == 0) {
		lock(fd, F_WRLCK, 30, 5);
		zoo_tell("child");
		zoo_wait();
		CHECK_EQ(probe(fd, F_WRLCK, 0, 1).l_pid, parent);
		CHECK_EQ(probe(fd, F_RDLCK, 4, 1).l_pid, parent);
		CHECK_EQ(probe(fd, F_RDLCK, 12, 1).l_type, F_UNLCK);
		CHECK_EQ(probe(fd, F_WRLCK, 12, 1).l_pid, parent);
		CHECK_EQ(probe(fd, F_WRLCK, 5, 5).l_type, F_UNLCK);
		CHECK_EQ(probe(fd, F_WRLCK, 1000, 1).l_pid, parent);
		zoo_tell("probed");
		zoo_await("done");
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	zoo_await("probed");
	CHECK_EQ(probe(fd, F_WRLCK, 0, 50).l_pid, child);
	zoo_tell("done");
	CHECK_EXIT(child, 0);
	zoo_pass();
}
