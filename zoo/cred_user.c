// area: credentials
// shows: a task of an ordinary user without any capability
// foreign: yes
#include "zoo.h"
#include <grp.h>

int main(void)
{
	pid_t child;

	TRY(chmod(".", 0777));
	child = TRY(fork());
	if (child == 0) {
		TRY(setgroups(0, NULL));
		TRY(setresgid(1000, 1000, 1000));
		TRY(setresuid(1000, 1000, 1000));
		zoo_tell("child");
		zoo_wait();
		CHECK_EQ(getuid(), 1000);
		CHECK_EQ(getegid(), 1000);
		CHECK(setuid(0) < 0 && errno == EPERM);
		CHECK(strstr(zoo_slurp("/proc/self/status"), "CapEff:\t0000000000000000"));
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 0);
	zoo_pass();
}
