// area: refusals
// shows: a task that waits for an automatic mount (autofs), whose daemon stops as well, is refused by name
// modes: pidns ns
// expect: refused "an automatic mount"
#include "zoo.h"
#include "autofs.h"
#include <poll.h>

int main(void)
{
	union autofs_v5_packet_union asked;
	int fds[2], root;
	pid_t child;

	if (getpid() != getpgrp())
		TRY(setpgid(0, 0));
	TRY(pipe(fds));
	root = autofs_mount("automatic", fds[1], "indirect");
	if (root < 0)
		zoo_skip("no autofs");
	child = TRY(fork());
	if (!child) {
		TRY(setpgid(0, 0));
		_exit(access("automatic/key", F_OK) ? errno : 0);
	}
	autofs_read(fds[0], &asked);
	zoo_ready();
	zoo_wait();
	TRY(ioctl(root, AUTOFS_IOC_FAIL, asked.v5_packet.wait_queue_token));
	CHECK_EXIT(child, ENOENT);
	zoo_pass();
}
