// area: credentials
// shows: keys in a keyring are left out with a warning, and a task without any is not given one
// warns: the keyring of its session (zoo)
// warns: its own keyring
// foreign: yes
#include "zoo.h"
#include <linux/keyctl.h>

int main(void)
{
	long ring = syscall(SYS_keyctl, KEYCTL_GET_KEYRING_ID, KEY_SPEC_PROCESS_KEYRING, 0);

	if (ring >= 0 || errno == ENOSYS)
		zoo_skip("no keyrings");
	CHECK_EQ(errno, ENOKEY);
	if (TRY(fork()) == 0) {
		ring = TRY(syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, "zoo"));
		TRY(syscall(SYS_add_key, "user", "secret", "content", 7ul, ring));
		TRY(syscall(SYS_add_key, "user", "own", "content", 7ul, KEY_SPEC_PROCESS_KEYRING));
		zoo_tell("child");
		zoo_wait();
		_exit(7);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK(syscall(SYS_keyctl, KEYCTL_GET_KEYRING_ID, KEY_SPEC_PROCESS_KEYRING, 0) < 0 && errno == ENOKEY);
	CHECK_EXIT(-1, 7);
	zoo_pass();
}
