// area: refusals
// shows: a limit of a user namespace in which nobody lives, above that of the tasks (bwrap
//   --disable-userns), is refused by name
// modes: plain leave-running userns
// expect: refused "the limit max_user_namespaces of its user namespace"
#include "zoo.h"
#include "user_limits.h"

int main(void)
{
	limit_enter();
	limit_set("1");
	limit_enter();
	zoo_ready();
	zoo_wait();
	/* The sandbox holds. */
	CHECK(unshare(CLONE_NEWUSER) < 0);
	zoo_pass();
}
