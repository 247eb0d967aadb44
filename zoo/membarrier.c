// area: futex and rseq
// shows: the registration for membarrier is kept
// foreign: yes
#include "zoo.h"
#include <linux/membarrier.h>

int main(void)
{
	if (syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0))
		zoo_skip("no membarrier");
	zoo_ready();
	zoo_wait();
	TRY(syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0));
	zoo_pass();
}
