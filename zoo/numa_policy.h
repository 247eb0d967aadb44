/* NUMA policies, without libnuma. */
#ifndef ZOO_NUMA_POLICY_H
#define ZOO_NUMA_POLICY_H

#include "zoo.h"
#include <linux/mempolicy.h>

enum { NODES = 1024 };

struct numa_policy {
	int mode;
	unsigned long nodes[NODES / 64];
};

static inline struct numa_policy numa_policy(void *at)
{
	struct numa_policy now = { 0 };

	TRY(syscall(SYS_get_mempolicy, &now.mode, now.nodes, NODES + 1, at, at ? MPOL_F_ADDR : 0));
	return now;
}

static inline void numa_choose(int mode, unsigned long nodes)
{
	if (syscall(SYS_set_mempolicy, mode, &nodes, 64ul) < 0)
		zoo_skip("no NUMA policies");
}

#endif
