/* Which page frames memory is in: those that relatives share are the same. */
#ifndef ZOO_FRAME_H
#define ZOO_FRAME_H

#include "zoo.h"

#define PAGE 4096

/*
 * Whoever reads these pages from outside must not part them: process_vm_readv(2) pins pages, and pinning
 * a page that is not exclusively its owner's gives the owner a copy first (Linux 5.19). Reading
 * /proc/PID/mem does not.
 */
static uint64_t frame(void *at)
{
	int fd = TRY(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
	uint64_t entry;

	CHECK_EQ(pread(fd, &entry, 8, (uintptr_t)at / PAGE * 8), 8);
	close(fd);
	return entry & ((1ull << 55) - 1);
}

#endif
