/*
 * A process with two threads and as much state of its own as the kernel keeps for
 * tasks. Prints a line and sleeps.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <grp.h>
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define MUST(x)                                                   \
	do {                                                      \
		if (!(x)) {                                       \
			fprintf(stderr, "%s: %s\n", #x, strerror(errno)); \
			exit(1);                                  \
		}                                                 \
	} while (0)

static char stacks[2][65536];

static void handler(int sig, siginfo_t *info, void *context)
{
	(void)sig, (void)info, (void)context;
}

static void forbid(int number)
{
	struct sock_filter code[] = {
		{ BPF_LD | BPF_W | BPF_ABS, 0, 0, offsetof(struct seccomp_data, nr) },
		{ BPF_JMP | BPF_JEQ | BPF_K, 0, 1, number },
		{ BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ERRNO | EPERM },
		{ BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW },
	};
	struct sock_fprog program = { 4, code };
	MUST(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_LOG, &program) == 0);
}

static void queue(int shared, int sig, int code, void *value)
{
	siginfo_t info;
	memset(&info, 0, sizeof(info));
	info.si_signo = sig;
	info.si_code = code;
	info.si_pid = 4711;
	info.si_uid = 42;
	info.si_value.sival_ptr = value;
	if (shared)
		MUST(syscall(SYS_rt_sigqueueinfo, getpid(), sig, &info) == 0);
	else
		MUST(syscall(SYS_rt_tgsigqueueinfo, getpid(), gettid(), sig, &info) == 0);
}

static void timer(int clock, int notify, long value, long seconds, long interval, int keep)
{
	struct sigevent event;
	int id;
	memset(&event, 0, sizeof(event));
	event.sigev_signo = SIGRTMIN + 5;
	event.sigev_notify = notify;
	event.sigev_value.sival_ptr = (void *)value;
	event._sigev_un._tid = gettid();
	MUST(syscall(SYS_timer_create, clock, &event, &id) == 0);
	struct itimerspec spec = { { interval, 7 }, { seconds, 0 } };
	MUST(syscall(SYS_timer_settime, id, 0, &spec, NULL) == 0);
	if (!keep)
		MUST(syscall(SYS_timer_delete, id) == 0);
}

static void common(int which)
{
	sigset_t set;
	stack_t stack = { stacks[which], 0, sizeof(stacks[which]) };
	MUST(sigaltstack(&stack, NULL) == 0);
	sigfillset(&set);
	if (which)
		sigdelset(&set, SIGUSR2);
	MUST(pthread_sigmask(SIG_SETMASK, &set, NULL) == 0);
	for (long i = 0; i < 40; i++)
		queue(0, SIGRTMIN + 1 + i % 2, -60 - i, (void *)(i + which * 1000));
	queue(0, SIGUSR1, 5, (void *)77);
	queue(0, SIGURG, -3, (void *)78);
	MUST(prctl(PR_SET_NAME, which ? "second \xc3" : "first\xff) x") == 0);
}

static void *second(void *arg)
{
	struct sched_param param = { 11 };
	MUST(prctl(PR_SET_SECUREBITS, 1 << 4) == 0);
	common(1);
	MUST(sched_setscheduler(0, SCHED_RR | SCHED_RESET_ON_FORK, &param) == 0);
	forbid(SYS_getitimer);
	MUST(syscall(SYS_setresgid, 70, 71, 72) == 0);
	MUST(syscall(SYS_setresuid, 60, 61, 62) == 0);
	/* header, then effective, permitted, inheritable, low words and high words */
	unsigned header[2] = { 0x20080522, 0 }, sets[6] = { 1 << 5, 1 << 5 | 1 << 10, 1 << 10, 0, 0, 0 };
	MUST(syscall(SYS_capset, header, sets) == 0);
	MUST(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, 10, 0, 0) == 0);
	MUST(prctl(PR_SET_PDEATHSIG, SIGHUP) == 0);
	*(volatile int *)arg = 1;
	for (;;)
		pause();
}

int main(void)
{
	volatile int on = 0;
	pthread_t thread;
	struct sigaction action;
	struct rlimit limit = { 1000, 1500 };
	struct itimerval real = { { 3, 5 }, { 5000, 0 } }, prof = { { 0, 0 }, { 7000, 0 } };
	gid_t groups[] = { 5, 6, 7 };

	memset(&action, 0, sizeof(action));
	action.sa_sigaction = handler;
	action.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
	sigaddset(&action.sa_mask, SIGQUIT);
	MUST(sigaction(SIGUSR1, &action, NULL) == 0);
	MUST(sigaction(SIGSEGV, &action, NULL) == 0);
	signal(SIGPIPE, SIG_IGN);
	MUST(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	MUST(setrlimit(RLIMIT_CORE, &limit) == 0);
	MUST(setpriority(PRIO_PROCESS, 0, 7) == 0);
	MUST(personality(ADDR_NO_RANDOMIZE) != -1);
	FILE *f = fopen("/proc/self/oom_score_adj", "w");
	MUST(f && fprintf(f, "321") == 3 && fclose(f) == 0);
	MUST(prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
	MUST(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
	MUST(syscall(SYS_membarrier, 1 << 4, 0, 0) == 0);
	MUST(setitimer(ITIMER_REAL, &real, NULL) == 0);
	MUST(setitimer(ITIMER_PROF, &prof, NULL) == 0);
	timer(CLOCK_MONOTONIC, SIGEV_SIGNAL, 0x1234567890, 4000, 0, 1);
	timer(CLOCK_REALTIME, SIGEV_SIGNAL, 0, 1, 0, 0);
	timer(CLOCK_REALTIME, SIGEV_THREAD_ID, -1, 4001, 3, 1);
	timer(CLOCK_REALTIME, SIGEV_SIGNAL, 0, 1, 0, 0);
	timer(CLOCK_BOOTTIME, SIGEV_NONE, 0, 0, 0, 1);
	MUST(setgroups(3, groups) == 0);
	for (int cap = 30; cap < 41; cap++)
		MUST(prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) == 0);
	forbid(SYS_setresuid + 1000);
	MUST(pthread_create(&thread, NULL, second, (void *)&on) == 0);
	while (!on)
		usleep(1000);
	common(0);
	queue(1, SIGRTMIN + 3, -9, (void *)1);
	queue(1, SIGRTMIN + 3, -9, (void *)2);
	queue(1, SIGCHLD, 1, NULL);
	MUST(syscall(SYS_setresuid, 60, 61, 62) == 0);
	MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
	forbid(SYS_setresuid);
	puts("ready");
	fflush(stdout);
	for (;;)
		pause();
}
