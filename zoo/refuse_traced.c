// area: refusals
// shows: a member of the tree that traces another in a signal stop is refused
// expect: refused "trace"
#include "zoo.h"
#include <sys/ptrace.h>

int main(void)
{
	int status;
	pid_t child = TRY(fork());

	if (child == 0) {
		TRY(ptrace(PTRACE_TRACEME, 0, 0, 0));
		raise(SIGUSR1);
		_exit(8);
	}
	TRY(waitpid(child, &status, 0));
	CHECK(WIFSTOPPED(status) && WSTOPSIG(status) == SIGUSR1);
	zoo_ready();
	zoo_wait();
	TRY(ptrace(PTRACE_DETACH, child, 0, 0));
	CHECK_EXIT(child, 8);
	zoo_pass();
}
