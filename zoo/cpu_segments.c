// area: processor state
// shows: the base addresses of FS and GS are kept
// foreign: yes
#include "zoo.h"
#include <asm/prctl.h>

int main(void)
{
	static char place[64];
	unsigned long fs, gs, now;

	TRY(syscall(SYS_arch_prctl, ARCH_SET_GS, place));
	TRY(syscall(SYS_arch_prctl, ARCH_GET_FS, &fs));
	TRY(syscall(SYS_arch_prctl, ARCH_GET_GS, &gs));
	zoo_ready();
	zoo_wait();
	TRY(syscall(SYS_arch_prctl, ARCH_GET_FS, &now));
	CHECK_EQ(now, fs);
	TRY(syscall(SYS_arch_prctl, ARCH_GET_GS, &now));
	CHECK_EQ(now, gs);
	CHECK_EQ(gs, (unsigned long)place);
	zoo_pass();
}
