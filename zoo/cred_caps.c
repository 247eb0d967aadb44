// area: credentials
// shows: capability sets: effective, permitted, inheritable, bounding, ambient, and the secure bits
// foreign: yes
#include "zoo.h"
#include <linux/capability.h>
#include <linux/securebits.h>
#include <sys/prctl.h>

int main(void)
{
	struct __user_cap_header_struct head = { _LINUX_CAPABILITY_VERSION_3, 0 };
	struct __user_cap_data_struct data[2], now[2];
	pid_t child = TRY(fork());

	if (child == 0) {
		TRY(prctl(PR_SET_SECUREBITS, SECBIT_KEEP_CAPS | SECBIT_NO_SETUID_FIXUP, 0, 0, 0));
		TRY(prctl(PR_CAPBSET_DROP, CAP_SYS_TIME, 0, 0, 0));
		TRY(prctl(PR_CAPBSET_DROP, CAP_AUDIT_WRITE, 0, 0, 0));
		TRY(syscall(SYS_capget, &head, data));
		data[0].permitted &= ~(1u << CAP_SYS_BOOT);
		data[0].effective = 1u << CAP_CHOWN | 1u << CAP_KILL;
		data[0].inheritable = 1u << CAP_KILL | 1u << CAP_NET_RAW;
		data[1].effective = 0;
		TRY(syscall(SYS_capset, &head, data));
		TRY(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_KILL, 0, 0));
		zoo_tell("child");
		zoo_wait();
		TRY(syscall(SYS_capget, &head, now));
		CHECK(memcmp(now, data, sizeof data) == 0);
		CHECK_EQ(prctl(PR_CAPBSET_READ, CAP_SYS_TIME, 0, 0, 0), 0);
		CHECK_EQ(prctl(PR_CAPBSET_READ, CAP_CHOWN, 0, 0, 0), 1);
		CHECK_EQ(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_IS_SET, CAP_KILL, 0, 0), 1);
		CHECK_EQ(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_IS_SET, CAP_NET_RAW, 0, 0), 0);
		CHECK_EQ(prctl(PR_GET_SECUREBITS, 0, 0, 0, 0), SECBIT_KEEP_CAPS | SECBIT_NO_SETUID_FIXUP);
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 0);
	zoo_pass();
}
