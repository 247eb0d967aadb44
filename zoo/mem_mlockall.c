// area: memory
// shows: all present and future memory stays locked
// foreign: yes
#include "zoo.h"

int main(void)
{
	char *area;

	TRY(mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT));
	zoo_ready();
	zoo_wait();
	area = zoo_map(65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	area[0] = 1;
	CHECK(!strstr(zoo_slurp("/proc/self/status"), "VmLck:\t       0 kB"));
	zoo_pass();
}
