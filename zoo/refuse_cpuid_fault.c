// area: refusals
// shows: a program that has CPUID fault (arch_prctl) is refused with --strict
// dump: --strict
// expect: refused "the fault that it gets from CPUID"
#include "zoo.h"
#include <asm/prctl.h>

int main(void)
{
	if (syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0))
		zoo_skip("a processor whose CPUID does not fault");
	zoo_ready();
	zoo_wait();
	CHECK_EQ(syscall(SYS_arch_prctl, ARCH_GET_CPUID, 0), 0);
	zoo_pass();
}
