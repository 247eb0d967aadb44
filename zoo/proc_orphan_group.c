// area: process tree
// shows: a process whose parent, session leader and group leader have all ended
// modes: pidns ns userns
#include "zoo.h"

int main(void)
{
	pid_t leader = TRY(fork()), ids[3];
	char text[64];

	if (leader == 0) {
		pid_t group;

		TRY(setsid());
		group = TRY(fork());
		if (group == 0) {
			group = getpid();
			TRY(setpgid(0, 0));
			if (TRY(fork()))
				_exit(0);
			WAIT_UNTIL(getppid() != group);
			snprintf(text, sizeof text, "%d %d %d", getpid(), getpgrp(), getsid(0));
			zoo_write("orphan", text);
			zoo_wait();
			snprintf(text, sizeof text, "%d %d %d", getpid(), getpgrp(), getsid(0));
			zoo_write("later", text);
			_exit(0);
		}
		CHECK_EXIT(group, 0);
		_exit(0);
	}
	CHECK_EXIT(leader, 0);
	zoo_await("orphan");
	CHECK_EQ(sscanf(zoo_slurp(zoo_path("orphan")), "%d %d %d", ids, ids + 1, ids + 2), 3);
	CHECK(ids[1] != ids[0] && ids[1] != ids[2] && ids[2] == leader);
	zoo_ready();
	zoo_wait();
	zoo_await("later");
	snprintf(text, sizeof text, "%d %d %d", ids[0], ids[1], ids[2]);
	CHECK(strcmp(zoo_slurp(zoo_path("later")), text) == 0);
	zoo_pass();
}
