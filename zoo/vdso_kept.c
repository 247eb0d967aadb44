// area: vDSO
// shows: a task that has unmapped vvar but kept its vdso
// foreign: yes
#include "zoo.h"

int main(void)
{
	char *maps = strdup(zoo_slurp("/proc/self/maps"));
	int count = 0;

	for (char *line = strtok(maps, "\n"); line; line = strtok(NULL, "\n")) {
		unsigned long start, end;

		if (strstr(line, "[vvar") && sscanf(line, "%lx-%lx", &start, &end) == 2) {
			TRY(munmap((void *)start, end - start));
			count++;
		}
	}
	if (!count)
		zoo_skip("no vvar");
	zoo_ready();
	zoo_wait();
	CHECK(strstr(zoo_slurp("/proc/self/maps"), "[vdso]"));
	CHECK(!strstr(zoo_slurp("/proc/self/maps"), "[vvar"));
	zoo_pass();
}
