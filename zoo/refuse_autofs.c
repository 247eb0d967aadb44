// area: refusals
// shows: an automatic mount (autofs) that asks nobody of the tree is refused by name
// modes: pidns ns
// expect: refused "is not of the tree, and nobody else is asked for mounts"
#include "zoo.h"
#include "autofs.h"

int main(void)
{
	int fds[2], status;
	pid_t daemon = TRY(fork());

	if (!daemon) {
		TRY(setpgid(0, 0));
		TRY(pipe(fds));
		_exit(autofs_mount("automatic", fds[1], "indirect") < 0);
	}
	CHECK_EQ(waitpid(daemon, &status, 0), daemon);
	if (status)
		zoo_skip("no autofs");
	zoo_ready();
	zoo_wait();
	TRY(access("automatic", F_OK));
	zoo_pass();
}
