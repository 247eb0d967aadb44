// area: directories
// shows: a root directory that is empty for ever, as the sandbox of Chromium has it: below a process in
//   /proc that has ended, in a user namespace of its own, of two tasks
// modes: pidns ns userns
#include "zoo.h"

static int confine(void *arg)
{
	(void)arg;
	TRY(chroot("/proc/self/fdinfo"));
	TRY(chdir("/"));
	_exit(0);
}

int main(void)
{
	static char stack[65536];
	int ask[2], answer[2];
	/* Nothing can be reported from inside but by the exit code. */
	char byte;
	pid_t child, between;

	TRY(pipe(ask));
	TRY(pipe(answer));
	child = TRY(fork());
	if (!child) {
		TRY(close(ask[1]));
		TRY(unshare(CLONE_NEWUSER));
		between = TRY(clone(confine, stack + sizeof stack, CLONE_FS | SIGCHLD, NULL));
		while (waitpid(between, NULL, 0) < 0)
			;
		/* Another one is there as well. */
		between = TRY(fork());
		if (!between)
			for (;;)
				pause();
		for (;;) {
			if (write(answer[1], "x", 1) != 1)
				_exit(6);
			if (read(ask[0], &byte, 1) != 1)
				break;
			if (!access("/self", F_OK) || !access("/proc", F_OK))
				_exit(5);
			if (kill(between, SIGKILL) || waitpid(between, NULL, 0) != between)
				_exit(6);
		}
		_exit(0);
	}
	TRY(close(ask[0]));
	TRY(close(answer[1]));
	CHECK_EQ(read(answer[0], &byte, 1), 1);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(write(ask[1], "x", 1), 1);
	CHECK_EQ(read(answer[0], &byte, 1), 1);
	TRY(close(ask[1]));
	CHECK_EXIT(child, 0);
	zoo_pass();
}
