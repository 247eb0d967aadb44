// area: file locks
// shows: a flock that only a mapping still holds is refused: nobody could take it again
// options: --file-locks
// expect: refused "whose descriptor is closed"
#include "zoo.h"
#include <sys/file.h>

int main(void)
{
	int fd = TRY(open("file", O_RDWR | O_CREAT, 0600)), other = TRY(open("file", O_RDWR));

	TRY(ftruncate(fd, 4096));
	CHECK(mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0) != MAP_FAILED);
	TRY(flock(fd, LOCK_EX));
	TRY(close(fd));
	zoo_ready();
	zoo_wait();
	CHECK(flock(other, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK);
	zoo_pass();
}
