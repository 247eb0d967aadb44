// area: vDSO
// shows: a task that has moved its vdso and vvar to another address
// foreign: yes
#include "zoo.h"

int main(void)
{
	char *maps = strdup(zoo_slurp("/proc/self/maps"));
	unsigned long first = 0, last = 0, start, end;
	char *new, want[64];

	for (char *line = strtok(maps, "\n"); line; line = strtok(NULL, "\n"))
		if ((strstr(line, "[vvar") || strstr(line, "[vdso]")) &&
		    sscanf(line, "%lx-%lx", &start, &end) == 2) {
			first = first ?: start;
			last = end;
		}
	if (!first)
		zoo_skip("no vDSO");
	new = zoo_map(last - first, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	maps = strdup(zoo_slurp("/proc/self/maps"));
	for (char *line = strtok(maps, "\n"); line; line = strtok(NULL, "\n"))
		if ((strstr(line, "[vvar") || strstr(line, "[vdso]")) &&
		    sscanf(line, "%lx-%lx", &start, &end) == 2)
			CHECK(mremap((void *)start, end - start, end - start, MREMAP_MAYMOVE | MREMAP_FIXED,
				     new + (start - first)) != MAP_FAILED);
	zoo_ready();
	zoo_wait();
	snprintf(want, sizeof want, "%lx-", (unsigned long)new);
	CHECK(strstr(zoo_slurp("/proc/self/maps"), want));
	CHECK(strstr(zoo_slurp("/proc/self/maps"), "[vdso]"));
	zoo_pass();
}
