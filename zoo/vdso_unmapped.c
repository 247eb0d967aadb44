// area: vDSO
// shows: a task that has unmapped vdso and vvar stays without
// foreign: yes
#include "zoo.h"

static int unmap(const char *names)
{
	char *maps = strdup(zoo_slurp("/proc/self/maps"));
	int count = 0;

	for (char *line = strtok(maps, "\n"); line; line = strtok(NULL, "\n")) {
		char *name = strchr(line, '[');
		unsigned long start, end;

		if (!name || !strstr(names, name) || sscanf(line, "%lx-%lx", &start, &end) != 2)
			continue;
		TRY(munmap((void *)start, end - start));
		count++;
	}
	return count;
}

int main(void)
{
	/* libc must not call into what is gone: only raw system calls tell the time from here on. */
	CHECK(unmap("[vdso] [vvar] [vvar_vclock]") >= 2);
	zoo_ready();
	zoo_wait();
	CHECK(!strstr(zoo_slurp("/proc/self/maps"), "[vdso]"));
	CHECK(!strstr(zoo_slurp("/proc/self/maps"), "[vvar"));
	zoo_pass();
}
