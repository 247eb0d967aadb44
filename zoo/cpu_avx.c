// area: processor state
// shows: AVX registers survive, in a task that sleeps and in one that computes
// foreign: yes
// build: -mavx
#include "zoo.h"
#include <immintrin.h>

static void load(const char *from)
{
	__asm__ volatile("vmovdqu 0(%0), %%ymm0\n\tvmovdqu 32(%0), %%ymm1\n\tvmovdqu 64(%0), %%ymm7\n\t"
			 "vmovdqu 96(%0), %%ymm15"
			 : : "r"(from) : "ymm0", "ymm1", "ymm7", "ymm15");
}

static void store(char *to)
{
	__asm__ volatile("vmovdqu %%ymm0, 0(%0)\n\tvmovdqu %%ymm1, 32(%0)\n\tvmovdqu %%ymm7, 64(%0)\n\t"
			 "vmovdqu %%ymm15, 96(%0)"
			 : : "r"(to) : "memory");
}

int main(void)
{
	volatile int *flag = zoo_map(4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1);
	char in[128], out[128];
	pid_t spins, sleeps;
	int status;

	if (!__builtin_cpu_supports("avx"))
		zoo_skip("no AVX");
	zoo_fill(in, sizeof in, 9);
	if (!(spins = TRY(fork()))) {
		zoo_tell("spins");
		load(in);
		while (!*flag)
			;
		store(out);
		_exit(memcmp(in, out, sizeof in) ? 1 : 0);
	}
	if (!(sleeps = TRY(fork()))) {
		long result;

		zoo_tell("sleeps");
		load(in);
		/* futex(FUTEX_WAIT), again and again, with nothing in between that could touch a register. */
		do
			__asm__ volatile("syscall"
					 : "=a"(result)
					 : "a"(SYS_futex), "D"(flag), "S"(0), "d"(0), "r"((long)0)
					 : "rcx", "r11", "memory");
		while (!*flag);
		store(out);
		_exit(memcmp(in, out, sizeof in) ? 1 : 0);
	}
	zoo_await("spins");
	zoo_await("sleeps");
	zoo_sleep_ms(20);
	zoo_ready();
	zoo_wait();
	*flag = 1;
	syscall(SYS_futex, flag, 1, 100, 0, 0, 0);
	CHECK_EXIT(spins, 0);
	while (waitpid(sleeps, &status, WNOHANG) == 0) {
		syscall(SYS_futex, flag, 1, 100, 0, 0, 0);
		zoo_sleep_ms(5);
	}
	CHECK_EQ(status, 0);
	zoo_pass();
}
