// area: seccomp
// shows: a filter that was installed with flags, and whose actions are a trap and a kill of the thread
// foreign: yes
#include "zoo.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>

static volatile sig_atomic_t trapped;

static void on_sys(int sig, siginfo_t *info, void *context)
{
	(void)context;
	trapped = sig == SIGSYS ? info->si_syscall : -1;
}

int main(void)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_sched_yield, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog prog = { 4, code };
	struct sigaction sa = { .sa_sigaction = on_sys, .sa_flags = SA_SIGINFO };

	TRY(sigaction(SIGSYS, &sa, NULL));
	TRY(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	CHECK_EQ(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_LOG, &prog), 0);
	zoo_ready();
	zoo_wait();
	syscall(SYS_sched_yield);
	CHECK_EQ(trapped, SYS_sched_yield);
	zoo_pass();
}
