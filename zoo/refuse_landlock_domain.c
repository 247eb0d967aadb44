// area: refusals
// shows: a task that Landlock confines, with no set of rules open any more, is refused
// expect: refused "Landlock domain (2 of 16 layers)"
#include "landlock.h"

int main(void)
{
	confine();
	confine();
	zoo_ready();
	zoo_wait();
	CHECK(mkdir("directory", 0700) < 0 && errno == EACCES);
	/* Nothing was added: there is room for 14 layers more. */
	for (int i = 0; i < 14; i++)
		confine();
	CHECK(one_more() < 0 && errno == E2BIG);
	zoo_pass();
}
