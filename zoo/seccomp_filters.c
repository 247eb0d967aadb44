// area: seccomp
// shows: two chained filters, one of them against calls that a restore needs, inherited by a child
// foreign: yes
#include "zoo.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>

/* Lets everything pass but CALL, which fails with ERROR. */
static void forbid(unsigned call, unsigned error)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog prog = { 4, code };

	TRY(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog));
}

static void verify(void)
{
	CHECK(syscall(SYS_setresuid, -1, -1, -1) < 0 && errno == 77);
	CHECK(syscall(SYS_mmap, 0, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != -1);
	CHECK(syscall(SYS_ptrace, 1234, 0, 0, 0) < 0 && errno == 78);
}

int main(void)
{
	pid_t inherits, later;

	TRY(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	forbid(SYS_setresuid, 77);
	forbid(SYS_ptrace, 78);
	inherits = TRY(fork());
	if (inherits == 0) {
		forbid(SYS_getpriority, 79);
		zoo_tell("child");
		zoo_wait();
		verify();
		CHECK(syscall(SYS_getpriority, 0, 0) < 0 && errno == 79);
		CHECK(strstr(zoo_slurp("/proc/self/status"), "Seccomp_filters:\t3"));
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	verify();
	CHECK(syscall(SYS_getpriority, 0, 0) >= 0);
	later = TRY(fork());
	if (later == 0) {
		verify();
		_exit(0);
	}
	CHECK_EXIT(inherits, 0);
	CHECK_EXIT(later, 0);
	zoo_pass();
}
