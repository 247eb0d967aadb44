// area: processor state
// shows: AVX-512 registers and masks survive
// foreign: yes
// build: -mavx512f
#include "zoo.h"

int main(void)
{
	volatile int *flag = zoo_map(4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1);
	char in[256], out[256];
	pid_t pid;

	if (!__builtin_cpu_supports("avx512f"))
		zoo_skip("no AVX-512");
	zoo_fill(in, sizeof in, 11);
	if (!(pid = TRY(fork()))) {
		unsigned mask = 0x5a3c, mask_out;

		zoo_tell("child");
		__asm__ volatile("vmovdqu64 0(%0), %%zmm0\n\tvmovdqu64 64(%0), %%zmm9\n\t"
				 "vmovdqu64 128(%0), %%zmm16\n\tvmovdqu64 192(%0), %%zmm31\n\tkmovw %1, %%k5"
				 : : "r"(in), "r"(mask));
		while (!*flag)
			;
		__asm__ volatile("vmovdqu64 %%zmm0, 0(%1)\n\tvmovdqu64 %%zmm9, 64(%1)\n\t"
				 "vmovdqu64 %%zmm16, 128(%1)\n\tvmovdqu64 %%zmm31, 192(%1)\n\tkmovw %%k5, %0"
				 : "=r"(mask_out) : "r"(out) : "memory");
		CHECK_EQ(mask_out, mask);
		CHECK(memcmp(in, out, sizeof in) == 0);
		_exit(0);
	}
	zoo_await("child");
	zoo_sleep_ms(20);
	zoo_ready();
	zoo_wait();
	*flag = 1;
	CHECK_EXIT(pid, 0);
	zoo_pass();
}
