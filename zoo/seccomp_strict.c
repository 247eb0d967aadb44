// area: seccomp
// shows: strict mode: read and write still work, anything else kills
// foreign: yes
#include "zoo.h"
#include <linux/seccomp.h>
#include <sys/prctl.h>

int main(void)
{
	int in[2], out[2];
	char c;
	pid_t child;

	TRY(pipe(in));
	TRY(pipe(out));
	child = TRY(fork());
	if (child == 0) {
		zoo_tell("child");
		TRY(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT));
		/* A read that was interrupted is tried again. */
		for (;;)
			if (syscall(SYS_read, in[0], &c, 1) == 1) {
				if (c == 'q')
					syscall(SYS_getpid);
				syscall(SYS_write, out[1], &c, 1);
			}
	}
	zoo_await("child");
	zoo_sleep_ms(20);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(write(in[1], "a", 1), 1);
	CHECK_EQ(read(out[0], &c, 1), 1);
	CHECK_EQ(c, 'a');
	CHECK_EQ(write(in[1], "q", 1), 1);
	CHECK_EQ(zoo_reap(child) & 0x7f, SIGKILL);
	zoo_pass();
}
