// area: file locks
// shows: a lease that is being broken: no second signal comes, and it can be given up
// foreign: yes
// options: --file-locks
// modes: -leave-running
#include "zoo.h"

int main(void)
{
	int w = TRY(open("write", O_RDWR | O_CREAT, 0600));
	struct timespec now = { 0 };
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGIO);
	TRY(sigprocmask(SIG_BLOCK, &set, NULL));
	TRY(fcntl(w, F_SETLEASE, F_WRLCK));
	CHECK(open("write", O_RDONLY | O_NONBLOCK) < 0 && errno == EWOULDBLOCK);
	CHECK_EQ(sigtimedwait(&set, NULL, &(struct timespec){ 10, 0 }), SIGIO);
	CHECK_EQ(fcntl(w, F_GETLEASE), F_RDLCK);
	zoo_ready();
	zoo_wait();
	CHECK(sigtimedwait(&set, NULL, &now) < 0);
	CHECK_EQ(fcntl(w, F_GETLEASE), F_RDLCK);
	TRY(fcntl(w, F_SETLEASE, F_UNLCK));
	close(TRY(open("write", O_RDONLY | O_NONBLOCK)));
	zoo_pass();
}
