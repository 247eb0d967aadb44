// area: futex and rseq
// shows: a task dumped inside of an rseq critical section commits it or takes its abort path
// foreign: yes
#include "zoo.h"
#include <linux/rseq.h>
#include <sys/rseq.h>

static volatile int *flag;
static long aborts __attribute__((unused)), commits;

/* Spins inside of the section for as long as it is let; a preemption sends it to the abort path. */
static void section(struct rseq *rs)
{
	__asm__ goto volatile(
		".pushsection __rseq_cs, \"aw\"\n\t"
		".balign 32\n\t"
		"3: .long 0, 0\n\t"
		".quad 1f, 2f-1f, 4f\n\t"
		".popsection\n\t"
		"leaq 3b(%%rip), %%rax\n\t"
		"movq %%rax, %c[cs](%[rs])\n\t"
		"1:\n\t"
		"5: cmpl $0, (%[flag])\n\tje 5b\n\t"
		"2: jmp %l[commit]\n\t"
		".long 0x53053053\n\t"
		"4: jmp %l[abort]\n\t"
		:
		: [rs] "r"(rs), [flag] "r"(flag), [cs] "i"(__builtin_offsetof(struct rseq, rseq_cs))
		: "rax", "memory", "cc"
		: commit, abort);
commit:
	commits++;
	return;
abort:
	aborts++;
}

int main(void)
{
	pid_t child;

	if (!__rseq_size)
		zoo_skip("no rseq registered by libc");
	flag = zoo_map(4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1);
	child = TRY(fork());
	if (child == 0) {
		struct rseq *rs = (struct rseq *)((char *)__builtin_thread_pointer() + __rseq_offset);

		CHECK(rs->cpu_id < 4096);
		zoo_tell("child");
		while (!commits)
			section(rs);
		rs->rseq_cs = 0;
		CHECK_EQ(rs->cpu_id, rs->cpu_id_start);
		/* The registration must have survived: libc's own area cannot be registered twice. */
		CHECK(syscall(SYS_rseq, rs, 32, 0, 0x53053053) < 0 && (errno == EBUSY || errno == EINVAL));
		_exit(0);
	}
	zoo_await("child");
	zoo_sleep_ms(50);
	zoo_ready();
	zoo_wait();
	*flag = 1;
	CHECK_EXIT(child, 0);
	zoo_pass();
}
