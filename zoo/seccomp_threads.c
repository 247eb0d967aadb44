// area: seccomp
// shows: filters that only some threads have; synchronizing all threads is still possible
// foreign: yes
#include "zoo.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sys/prctl.h>

static bool ready, synchronized;

static void forbid(unsigned call, unsigned error, unsigned flags)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog prog = { 4, code };

	CHECK_EQ(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &prog), 0);
}

static void *work(void *arg)
{
	forbid(SYS_sched_yield, 66, 0);
	__atomic_store_n(&ready, true, __ATOMIC_SEQ_CST);
	zoo_wait();
	CHECK(syscall(SYS_sched_yield) < 0 && errno == 66);
	forbid(SYS_getpriority, 67, SECCOMP_FILTER_FLAG_TSYNC);
	__atomic_store_n(&synchronized, true, __ATOMIC_SEQ_CST);
	return arg;
}

int main(void)
{
	pthread_t thread;

	TRY(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	CHECK(pthread_create(&thread, NULL, work, NULL) == 0);
	WAIT_UNTIL(__atomic_load_n(&ready, __ATOMIC_SEQ_CST));
	zoo_ready();
	zoo_wait();
	if (!__atomic_load_n(&synchronized, __ATOMIC_SEQ_CST))
		CHECK(syscall(SYS_sched_yield) == 0 || errno == 66);
	CHECK(pthread_join(thread, NULL) == 0);
	CHECK(syscall(SYS_getpriority, 0, 0) < 0 && errno == 67);
	CHECK(syscall(SYS_sched_yield) < 0 && errno == 66);
	zoo_pass();
}
