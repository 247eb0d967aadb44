// area: file locks
// shows: flock: an exclusive and a shared lock belong to the open file, also through dup and fork
// foreign: yes
// options: --file-locks
#include "zoo.h"
#include <sys/file.h>

int main(void)
{
	int ex = TRY(open("exclusive", O_RDWR | O_CREAT, 0600)), sh = TRY(open("shared", O_RDWR | O_CREAT, 0600));
	int other_ex = TRY(open("exclusive", O_RDWR)), other_sh = TRY(open("shared", O_RDWR)), copy;
	pid_t child;

	TRY(flock(ex, LOCK_EX));
	TRY(flock(sh, LOCK_SH));
	copy = TRY(dup(ex));
	TRY(close(ex));
	child = TRY(fork());
	if (child == 0) {
		zoo_tell("child");
		zoo_wait();
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK(flock(other_ex, LOCK_SH | LOCK_NB) < 0 && errno == EWOULDBLOCK);
	CHECK(flock(other_sh, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK);
	TRY(flock(other_sh, LOCK_SH | LOCK_NB));
	CHECK_EXIT(child, 0);
	TRY(flock(copy, LOCK_UN));
	TRY(flock(other_ex, LOCK_EX | LOCK_NB));
	zoo_pass();
}
