// area: files
// shows: a child without any open descriptor has none after the restore
// foreign: yes
#include "zoo.h"

int main(void)
{
	pid_t child = TRY(fork());

	if (child == 0) {
		syscall(SYS_close_range, 0, ~0u, 0);
		zoo_tell("child");
		zoo_wait();
		for (int fd = 0; fd < 1024; fd++)
			if (fcntl(fd, F_GETFD) >= 0)
				_exit(1);
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 0);
	zoo_pass();
}
