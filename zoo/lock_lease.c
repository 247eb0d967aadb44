// area: file locks
// shows: read and write leases, on the open files that had them
// foreign: yes
// options: --file-locks
// modes: -leave-running
#include "zoo.h"

int main(void)
{
	int r = TRY(open("read", O_RDONLY | O_CREAT, 0600)), w = TRY(open("write", O_RDWR | O_CREAT, 0600));
	int none = TRY(open("read", O_RDONLY)), copy;
	struct timespec now = { 0 };
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGIO);
	TRY(sigprocmask(SIG_BLOCK, &set, NULL));
	TRY(fcntl(r, F_SETLEASE, F_RDLCK));
	TRY(fcntl(w, F_SETLEASE, F_WRLCK));
	copy = TRY(dup(w));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(fcntl(r, F_GETLEASE), F_RDLCK);
	CHECK_EQ(fcntl(w, F_GETLEASE), F_WRLCK);
	CHECK_EQ(fcntl(copy, F_GETLEASE), F_WRLCK);
	/* Leases are looked up by owner, so another open file of the same owner sees them as well. */
	(void)none;
	CHECK(sigtimedwait(&set, NULL, &now) < 0);
	CHECK(open("write", O_RDWR | O_NONBLOCK) < 0 && errno == EWOULDBLOCK);
	CHECK_EQ(sigtimedwait(&set, NULL, &(struct timespec){ 10, 0 }), SIGIO);
	zoo_pass();
}
