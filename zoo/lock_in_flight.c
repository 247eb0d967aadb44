// area: file locks
// shows: a lock of an open file that is nowhere but in a socket's queue is refused
// options: --file-locks
// expect: refused "in flight"
#include "zoo.h"
#include "scm.h"
#include <sys/file.h>

int main(void)
{
	int fd = TRY(open("file", O_RDWR | O_CREAT, 0600)), other = TRY(open("file", O_RDWR)), ends[2];

	TRY(socketpair(AF_UNIX, SOCK_DGRAM, 0, ends));
	TRY(flock(fd, LOCK_EX));
	send_fd(ends[0], fd);
	TRY(close(fd));
	zoo_ready();
	zoo_wait();
	CHECK(flock(other, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK);
	TRY(flock(recv_fd(ends[1]), LOCK_UN));
	TRY(flock(other, LOCK_EX | LOCK_NB));
	zoo_pass();
}
