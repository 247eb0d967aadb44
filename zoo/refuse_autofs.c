// area: refusals
// shows: automatic mounts (autofs), whose daemon is a task of the tree, are refused by name
// modes: pidns ns
// expect: refused "automatic mounts cannot be restored"
#include "zoo.h"
#include <sys/mount.h>

int main(void)
{
	char options[128];
	int fds[2];

	TRY(pipe(fds));
	TRY(mkdir("automatic", 0755));
	snprintf(options, sizeof options, "fd=%d,pgrp=%d,minproto=5,maxproto=5,indirect", fds[1], (int)getpgrp());
	if (mount("zoo", "automatic", "autofs", 0, options))
		zoo_skip("no autofs");
	TRY(close(fds[1]));
	zoo_ready();
	zoo_wait();
	TRY(access("automatic", F_OK));
	zoo_pass();
}
