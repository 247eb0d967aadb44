// area: process tree
// shows: a stopped task stays stopped until SIGCONT
// foreign: yes
#include "zoo.h"

int main(void)
{
	pid_t child = TRY(fork());
	int status;

	if (child == 0) {
		raise(SIGSTOP);
		_exit(12);
	}
	/* The stop is seen, but not consumed: its notice must survive too. */
	TRY(waitid(P_PID, child, &(siginfo_t){}, WSTOPPED | WNOWAIT));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(TRY(waitpid(child, &status, WUNTRACED | WNOHANG)), child);
	CHECK(WIFSTOPPED(status));
	CHECK_EQ(WSTOPSIG(status), SIGSTOP);
	TRY(kill(child, SIGCONT));
	CHECK_EXIT(child, 12);
	zoo_pass();
}
