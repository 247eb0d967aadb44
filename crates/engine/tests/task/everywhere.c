/*
 * A process whose critical section is everywhere but in its own code, and that says so again whenever the kernel has forgotten
 * it. Prints a line before. Whoever is sent to the abort handler stays there.
 */
#define _GNU_SOURCE
#include <linux/rseq.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/rseq.h>

extern char end;

int main(void)
{
	static struct rseq_cs everywhere __attribute__((aligned(32)));
	struct rseq *rs = (struct rseq *)((char *)__builtin_thread_pointer() + __rseq_offset);

	everywhere.start_ip = (unsigned long)&end;
	everywhere.post_commit_offset = (1ul << 47) - 2 * 4096 - everywhere.start_ip;
	puts("ready");
	fflush(stdout);
	if (!__rseq_size)
		for (;;)
			;
	__asm__ volatile("leaq 2f(%%rip), %%rax\n\t"
			 "movq %%rax, %[abort]\n\t"
			 "1: movq %[section], %c[at](%[rs])\n\t"
			 "jmp 1b\n\t"
			 ".long 0x53053053\n\t"
			 "2: jmp 2b\n\t"
			 : [abort] "=m"(everywhere.abort_ip)
			 : [rs] "r"(rs), [section] "r"(&everywhere),
			   [at] "i"(offsetof(struct rseq, rseq_cs))
			 : "rax", "memory");
}
