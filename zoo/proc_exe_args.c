// area: process tree
// shows: a program that has renamed itself and moved the bounds of its arguments
// foreign: yes
#include "zoo.h"
#include <sys/prctl.h>

int main(int argc, char **argv)
{
	static char title[] = "a new title of this program";
	char name[16];

	(void)argc, (void)argv;
	TRY(prctl(PR_SET_NAME, "renamed"));
	if (prctl(PR_SET_MM, PR_SET_MM_ARG_START, title, 0, 0) == 0)
		TRY(prctl(PR_SET_MM, PR_SET_MM_ARG_END, title + sizeof title, 0, 0));
	zoo_ready();
	zoo_wait();
	TRY(prctl(PR_GET_NAME, name));
	CHECK(strcmp(name, "renamed") == 0);
	zoo_pass();
}
