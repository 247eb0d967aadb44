// area: vDSO
// shows: the vDSO stays where it was and its functions work at the addresses known before
// foreign: yes
#include "zoo.h"
#include <sys/auxv.h>
#include <sys/time.h>
#include <elf.h>

/* Finds a function of the vDSO through its dynamic symbols. */
static void *symbol(const char *name)
{
	const Elf64_Ehdr *elf = (void *)getauxval(AT_SYSINFO_EHDR);
	const Elf64_Phdr *ph;
	const Elf64_Dyn *dyn = NULL;
	const Elf64_Sym *syms = NULL;
	const char *strings = NULL, *base = (const char *)elf;
	uint32_t count = 0;

	if (!elf)
		return NULL;
	ph = (void *)(base + elf->e_phoff);
	for (int i = 0; i < elf->e_phnum; i++)
		if (ph[i].p_type == PT_DYNAMIC)
			dyn = (void *)(base + ph[i].p_offset);
	for (; dyn && dyn->d_tag != DT_NULL; dyn++) {
		if (dyn->d_tag == DT_SYMTAB)
			syms = (void *)(base + dyn->d_un.d_ptr);
		if (dyn->d_tag == DT_STRTAB)
			strings = base + dyn->d_un.d_ptr;
	}
	count = syms && strings ? 64 : 0;
	for (uint32_t i = 0; i < count && (const char *)(syms + i) < strings; i++)
		if (strcmp(strings + syms[i].st_name, name) == 0)
			return (void *)(base + syms[i].st_value);
	return NULL;
}

int main(void)
{
	int (*gettime)(clockid_t, struct timespec *) = symbol("__vdso_clock_gettime");
	int (*gettod)(struct timeval *, void *) = symbol("__vdso_gettimeofday");
	long (*getcpu_)(unsigned *, unsigned *, void *) = symbol("__vdso_getcpu");
	time_t (*time_)(time_t *) = symbol("__vdso_time");
	struct timespec before, after;
	struct timeval tv;
	unsigned cpu;

	if (!gettime || !gettod || !getcpu_ || !time_)
		zoo_skip("no vDSO");
	CHECK(gettime(CLOCK_MONOTONIC, &before) == 0);
	zoo_ready();
	zoo_wait();
	CHECK(gettime(CLOCK_MONOTONIC, &after) == 0);
	CHECK(after.tv_sec > before.tv_sec ||
	      (after.tv_sec == before.tv_sec && after.tv_nsec > before.tv_nsec));
	CHECK(gettod(&tv, NULL) == 0 && tv.tv_sec > 1600000000);
	CHECK(getcpu_(&cpu, NULL, NULL) == 0 && cpu < 4096);
	CHECK(time_(NULL) > 1600000000);
	CHECK(time(NULL) > 1600000000);
	zoo_pass();
}
