// area: process tree
// shows: the environment, arguments and auxiliary vector read the same
// foreign: yes
#include "zoo.h"
#include <sys/auxv.h>

extern char **environ;

int main(int argc, char **argv)
{
	char before[3][1 << 16];
	const char *names[] = { "/proc/self/cmdline", "/proc/self/environ", "/proc/self/auxv" };
	unsigned long random = getauxval(AT_RANDOM), vdso = getauxval(AT_SYSINFO_EHDR);

	for (int i = 0; i < 3; i++)
		memcpy(before[i], zoo_slurp(names[i]), sizeof before[i]);
	TRY(setenv("ZOO_LATE", "set by the program", 1));
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 3; i++)
		CHECK(memcmp(before[i], zoo_slurp(names[i]), sizeof before[i]) == 0);
	CHECK(strcmp(getenv("ZOO_LATE"), "set by the program") == 0);
	CHECK(strcmp(getenv("ZOO"), "torpor") == 0);
	CHECK_EQ(getauxval(AT_RANDOM), random);
	CHECK_EQ(getauxval(AT_SYSINFO_EHDR), vdso);
	CHECK(argc == 1 && argv[0]);
	zoo_pass();
}
