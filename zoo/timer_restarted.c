// area: timers
// shows: calls that a stop has interrupted before, so that the kernel has restarted them, go on without a signal that never was: nanosleep, poll, futex
// foreign: yes
#include "zoo.h"

#include <linux/futex.h>
#include <poll.h>

#define CALLS 4

static void rest(int call)
{
	struct timespec long_time = { 1000, 0 };
	static int word;

	switch (call) {
	case 0:
		nanosleep(&long_time, NULL);
		break;
	case 1:
		clock_nanosleep(CLOCK_MONOTONIC, 0, &long_time, NULL);
		break;
	case 2:
		poll(NULL, 0, 1000000);
		break;
	default:
		/* As sem_timedwait(3) and runtimes have it: syscall(2) has the number in no fixed place. */
		__asm__ volatile("xor %%r8d, %%r8d\n\txor %%r9d, %%r9d\n\tmov %0, %%r10\n\tmov $202, %%eax\n\tsyscall"
				 :
				 : "r"(&long_time), "D"(&word), "S"((long)FUTEX_WAIT_PRIVATE), "d"(0L)
				 : "rax", "rcx", "r8", "r9", "r10", "r11", "memory");
	}
}

/* The call that a process is in, -1 if it runs. */
static int call_of(pid_t pid)
{
	char name[64];
	int call = -1;
	FILE *file;

	snprintf(name, sizeof(name), "/proc/%d/syscall", pid);
	file = fopen(name, "r");
	if (!file || fscanf(file, "%d", &call) != 1)
		call = -1;
	if (file)
		fclose(file);
	return call;
}

static int is_resting(pid_t pid)
{
	int call = call_of(pid);

	return call == SYS_nanosleep || call == SYS_clock_nanosleep || call == SYS_poll || call == SYS_futex ||
	       call == SYS_restart_syscall;
}

int main(void)
{
	pid_t pids[CALLS];
	siginfo_t gone = { 0 };
	int status;

	for (int i = 0; i < CALLS; i++) {
		if (!(pids[i] = TRY(fork()))) {
			rest(i);
			_exit(1);
		}
		while (!is_resting(pids[i]))
			zoo_sleep_ms(1);
		TRY(kill(pids[i], SIGSTOP));
		TRY(waitpid(pids[i], &status, WUNTRACED));
		TRY(kill(pids[i], SIGCONT));
		while (call_of(pids[i]) != SYS_restart_syscall)
			zoo_sleep_ms(1);
	}
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < CALLS; i++) {
		WAIT_UNTIL(call_of(pids[i]) >= 0 || waitid(P_PID, pids[i], &gone, WEXITED | WNOHANG | WNOWAIT) || gone.si_pid);
		/* What has a signal that never was ends within no time. */
		zoo_sleep_ms(20);
		if (!is_resting(pids[i]))
			zoo_fail("call %d has ended", i);
	}
	for (int i = 0; i < CALLS; i++) {
		TRY(kill(pids[i], SIGKILL));
		TRY(waitpid(pids[i], &status, 0));
	}
	zoo_pass();
}
