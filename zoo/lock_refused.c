// area: file locks
// shows: a held file lock is refused without --file-locks
// expect: refused "file-locks"
#include "zoo.h"
#include <sys/file.h>

int main(void)
{
	int fd = TRY(open("file", O_RDWR | O_CREAT, 0600)), other = TRY(open("file", O_RDWR));

	TRY(flock(fd, LOCK_EX));
	zoo_ready();
	zoo_wait();
	CHECK(flock(other, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK);
	zoo_pass();
}
