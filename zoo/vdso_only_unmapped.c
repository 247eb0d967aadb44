// area: vDSO
// shows: a task that has unmapped its vdso but kept vvar, as Valgrind does
// foreign: yes
#include "zoo.h"

int main(void)
{
	char *maps = strdup(zoo_slurp("/proc/self/maps"));
	unsigned long start = 0, end = 0;

	for (char *line = strtok(maps, "\n"); line; line = strtok(NULL, "\n"))
		if (strstr(line, "[vdso]"))
			sscanf(line, "%lx-%lx", &start, &end);
	if (!start)
		zoo_skip("no vDSO");
	TRY(munmap((void *)start, end - start));
	zoo_ready();
	zoo_wait();
	CHECK(!strstr(zoo_slurp("/proc/self/maps"), "[vdso]"));
	CHECK(strstr(zoo_slurp("/proc/self/maps"), "[vvar"));
	zoo_pass();
}
