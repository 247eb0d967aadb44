// area: processor state
// build: -mno-red-zone
// shows: general registers, flags, x87, MMX, SSE and MXCSR survive in a task that never leaves user space
// foreign: yes
#include "zoo.h"

static unsigned char fpu[2][512] __attribute__((aligned(16)));

/* Loads every register with a value of its own, spins until told to stop, and reads all back. */
__attribute__((noinline)) static void spin(const unsigned long *in, unsigned long *out, volatile int *flag)
{
	__asm__ volatile(
		"push %%rbp\n\t"
		"push %[out]\n\t"
		"mov %[flag], %%rcx\n\t"
		"mov %[in], %%rax\n\t"
		"mov 8(%%rax), %%rbx\n\tmov 16(%%rax), %%rdx\n\tmov 24(%%rax), %%rsi\n\tmov 32(%%rax), %%rdi\n\t"
		"mov 40(%%rax), %%rbp\n\tmov 48(%%rax), %%r8\n\tmov 56(%%rax), %%r9\n\tmov 64(%%rax), %%r10\n\t"
		"mov 72(%%rax), %%r11\n\tmov 80(%%rax), %%r12\n\tmov 88(%%rax), %%r13\n\tmov 96(%%rax), %%r14\n\t"
		"mov 104(%%rax), %%r15\n\t"
		"1: cmpl $0, (%%rcx)\n\tje 1b\n\t"
		"pop %%rax\n\t"
		"mov %%rbx, 8(%%rax)\n\tmov %%rdx, 16(%%rax)\n\tmov %%rsi, 24(%%rax)\n\tmov %%rdi, 32(%%rax)\n\t"
		"mov %%rbp, 40(%%rax)\n\tmov %%r8, 48(%%rax)\n\tmov %%r9, 56(%%rax)\n\tmov %%r10, 64(%%rax)\n\t"
		"mov %%r11, 72(%%rax)\n\tmov %%r12, 80(%%rax)\n\tmov %%r13, 88(%%rax)\n\tmov %%r14, 96(%%rax)\n\t"
		"mov %%r15, 104(%%rax)\n\t"
		"pop %%rbp\n\t"
		: [in] "+D"(in), [out] "+S"(out), [flag] "+d"(flag)
		:
		: "rax", "rbx", "rcx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "memory", "cc");
}

static int child(volatile int *flag)
{
	unsigned long in[14], out[14] = { 0 };
	unsigned char area[512] __attribute__((aligned(16)));

	zoo_fill(in, sizeof in, 3);
	zoo_fill(fpu[0], sizeof fpu[0], 4);
	/* Start from a valid image: x87 control, tag and MXCSR (rounding down) are not free to choose. */
	__asm__ volatile("fxsave %0" : "=m"(area));
	memcpy(fpu[0], area, 32);
	*(uint16_t *)fpu[0] = 0x0f7f;
	fpu[0][4] = 0x3f;
	*(uint32_t *)(fpu[0] + 24) = 0x3f80;
	for (int i = 0; i < 8; i++)
		memset(fpu[0] + 32 + 16 * i + 10, 0, 6);
	memset(fpu[0] + 416, 0, 96);
	zoo_tell("child");
	__asm__ volatile("fxrstor %0" : : "m"(fpu[0]));
	spin(in, out, flag);
	__asm__ volatile("fxsave %0" : "=m"(fpu[1]));
	__asm__ volatile("fninit");
	__asm__ volatile("ldmxcsr %0" : : "m"((uint32_t){ 0x1f80 }));
	CHECK(memcmp(in + 1, out + 1, sizeof in - 8) == 0);
	CHECK(memcmp(fpu[0], fpu[1], 8) == 0);
	CHECK(memcmp(fpu[0] + 24, fpu[1] + 24, 392) == 0);
	return 0;
}

int main(void)
{
	volatile int *flag = zoo_map(4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1);
	pid_t pid = TRY(fork());

	if (pid == 0)
		_exit(child(flag));
	zoo_await("child");
	zoo_sleep_ms(20);
	zoo_ready();
	zoo_wait();
	*flag = 1;
	CHECK_EXIT(pid, 0);
	zoo_pass();
}
