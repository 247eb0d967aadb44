// area: refusals
// shows: where keys go that a thread asks for (KEYCTL_SET_REQKEY_KEYRING) is refused with --strict, if it has chosen
// dump: --strict
// expect: refused "where keys go that it asks for"
#include "zoo.h"
#include <linux/keyctl.h>

int main(void)
{
	if (syscall(SYS_keyctl, KEYCTL_SET_REQKEY_KEYRING, KEY_REQKEY_DEFL_USER_KEYRING) < 0)
		zoo_skip("no keyrings");
	zoo_ready();
	zoo_wait();
	CHECK_EQ(syscall(SYS_keyctl, KEYCTL_SET_REQKEY_KEYRING, KEY_REQKEY_DEFL_NO_CHANGE), KEY_REQKEY_DEFL_USER_KEYRING);
	zoo_pass();
}
