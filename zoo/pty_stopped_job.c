// area: terminals
// shows: a job in the background of a terminal, stopped because it wanted to read
// foreign: yes exit-code
#include "zoo.h"
#include <sys/ioctl.h>
#include <termios.h>

/* The form of others does not say whether the parent has been told of the stop (exit-code): it is told again. */
int main(void)
{
	int master = TRY(posix_openpt(O_RDWR | O_NOCTTY));
	pid_t shell;

	TRY(unlockpt(master));
	shell = TRY(fork());
	if (shell == 0) {
		int slave, status;
		pid_t job;

		TRY(setsid());
		slave = TRY(open(ptsname(master), O_RDWR));
		signal(SIGTTOU, SIG_IGN);
		job = TRY(fork());
		if (job == 0) {
			char line[16];

			TRY(setpgid(0, 0));
			_exit(read(slave, line, sizeof line) == 3 ? 5 : 6);
		}
		TRY(waitpid(job, &status, WUNTRACED));
		CHECK(WIFSTOPPED(status) && WSTOPSIG(status) == SIGTTIN);
		zoo_tell("shell");
		zoo_wait();
		CHECK_EQ(waitpid(job, &status, WNOHANG), 0);
		TRY(tcsetpgrp(slave, job));
		TRY(kill(job, SIGCONT));
		zoo_tell("continued");
		CHECK_EXIT(job, 5);
		_exit(0);
	}
	zoo_await("shell");
	zoo_ready();
	zoo_wait();
	zoo_await("continued");
	CHECK_EQ(write(master, "hi\n", 3), 3);
	CHECK_EXIT(shell, 0);
	zoo_pass();
}
