// area: refusals
// shows: a NUMA policy of a single mapping is refused with --strict
// dump: --strict
// expect: refused "NUMA policy of its mappings"
#include "numa_policy.h"

int main(void)
{
	char *area = zoo_map(1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	unsigned long nodes = 1;

	if (syscall(SYS_mbind, area, 1 << 20, MPOL_BIND, &nodes, 64ul, 0) < 0)
		zoo_skip("no NUMA policies");
	zoo_ready();
	zoo_wait();
	CHECK_EQ(numa_policy(area).mode, MPOL_BIND);
	zoo_pass();
}
