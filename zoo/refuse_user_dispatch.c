// area: refusals
// shows: system calls that come back to the program (Wine has them) are refused with --strict
// dump: --strict
// expect: refused "PR_SET_SYSCALL_USER_DISPATCH"
#include "zoo.h"
#include <sys/prctl.h>

#ifndef PR_SET_SYSCALL_USER_DISPATCH
#define PR_SET_SYSCALL_USER_DISPATCH 59
#endif

static char selector;

int main(void)
{
	/* All addresses are allowed, and the selector says so, too. */
	if (prctl(PR_SET_SYSCALL_USER_DISPATCH, 1, 0, 0, &selector))
		zoo_skip("no user dispatch");
	zoo_ready();
	zoo_wait();
	TRY(prctl(PR_SET_SYSCALL_USER_DISPATCH, 0, 0, 0, 0));
	zoo_pass();
}
