// area: credentials
// shows: threads with ids and capabilities of their own
// foreign: yes
#include "zoo.h"
#include <linux/capability.h>
#include <pthread.h>

static bool ready;

static void *work(void *arg)
{
	struct __user_cap_header_struct head = { _LINUX_CAPABILITY_VERSION_3, 0 };
	struct __user_cap_data_struct data[2] = { 0 }, now[2];

	/* The raw calls act on this thread only. */
	TRY(syscall(SYS_setresgid, 5, 6, 7));
	data[0].permitted = 1u << CAP_SETUID | 1u << CAP_CHOWN;
	data[0].effective = 1u << CAP_SETUID;
	TRY(syscall(SYS_capset, &head, data));
	TRY(syscall(SYS_setresuid, 8, 0, 10));
	TRY(syscall(SYS_capget, &head, data));
	__atomic_store_n(&ready, true, __ATOMIC_SEQ_CST);
	zoo_wait();
	CHECK_EQ(getuid(), 8);
	CHECK_EQ(getgid(), 5);
	CHECK_EQ(getegid(), 6);
	TRY(syscall(SYS_capget, &head, now));
	CHECK(memcmp(now, data, sizeof data) == 0);
	return arg;
}

int main(void)
{
	pthread_t thread;

	CHECK(pthread_create(&thread, NULL, work, NULL) == 0);
	WAIT_UNTIL(__atomic_load_n(&ready, __ATOMIC_SEQ_CST));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(getuid(), 0);
	CHECK_EQ(getgid(), 0);
	CHECK(pthread_join(thread, NULL) == 0);
	zoo_pass();
}
