// area: file locks
// shows: open file description locks: a whole file, overlapping ranges, one that a child inherited
// foreign: yes
// options: --file-locks
#include "zoo.h"

static int ofd(int fd, int op, short type, off_t start, off_t len)
{
	struct flock fl = { .l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = len };

	if (fcntl(fd, op, &fl) < 0)
		return -1;
	return op == F_OFD_GETLK ? fl.l_type : 0;
}

int main(void)
{
	int a = TRY(open("whole", O_RDWR | O_CREAT, 0600)), b = TRY(open("parts", O_RDWR | O_CREAT, 0600));
	int other_a = TRY(open("whole", O_RDWR)), other_b = TRY(open("parts", O_RDWR));
	pid_t child;

	TRY(ofd(a, F_OFD_SETLK, F_WRLCK, 0, 0));
	for (int i = 0; i < 4; i++)
		TRY(ofd(b, F_OFD_SETLK, F_RDLCK, i * 10, 15));
	child = TRY(fork());
	if (child == 0) {
		zoo_tell("child");
		zoo_wait();
		/* Only the child still holds the open files. */
		zoo_await("closed");
		CHECK_EQ(ofd(other_a, F_OFD_GETLK, F_RDLCK, 0, 1), F_WRLCK);
		CHECK_EQ(ofd(other_b, F_OFD_GETLK, F_WRLCK, 30, 1), F_RDLCK);
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK(ofd(other_a, F_OFD_SETLK, F_WRLCK, 5, 1) < 0 && errno == EAGAIN);
	CHECK_EQ(ofd(other_b, F_OFD_GETLK, F_WRLCK, 44, 1), F_RDLCK);
	CHECK_EQ(ofd(other_b, F_OFD_GETLK, F_WRLCK, 45, 1), F_UNLCK);
	TRY(close(a));
	TRY(close(b));
	zoo_tell("closed");
	CHECK_EXIT(child, 0);
	zoo_pass();
}
