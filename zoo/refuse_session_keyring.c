// area: refusals
// shows: keys in the keyring of a session are refused with --strict
// dump: --strict
// expect: refused "the keyring of its session (zoo)"
#include "zoo.h"
#include <linux/keyctl.h>

int main(void)
{
	long ring = syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, "zoo"), key;

	if (ring < 0)
		zoo_skip("no keyrings");
	key = TRY(syscall(SYS_add_key, "user", "secret", "content", 7ul, ring));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(syscall(SYS_keyctl, KEYCTL_GET_KEYRING_ID, KEY_SPEC_SESSION_KEYRING, 0), ring);
	CHECK_EQ(syscall(SYS_keyctl, KEYCTL_SEARCH, KEY_SPEC_SESSION_KEYRING, "user", "secret", 0), key);
	zoo_pass();
}
