// area: scheduling
// shows: a NUMA policy of a single mapping is left out with a warning
// warns: NUMA policy of its mappings
// foreign: yes
#include "numa_policy.h"

int main(void)
{
	char *area = zoo_map(1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	unsigned long nodes = 1;

	if (syscall(SYS_mbind, area, 1 << 20, MPOL_BIND, &nodes, 64ul, 0) < 0)
		zoo_skip("no NUMA policies");
	memset(area, 7, 1 << 20);
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 1 << 20; i++)
		CHECK_EQ(area[i], 7);
	zoo_pass();
}
