// area: refusals
// shows: a user namespace with a limit (/proc/sys/user), as sandboxes set it, is refused by name
// modes: plain leave-running userns
// expect: refused "the limit max_user_namespaces of its user namespace"
#include "zoo.h"
#include "user_limits.h"

int main(void)
{
	limit_enter();
	limit_set("1");
	zoo_ready();
	zoo_wait();
	zoo_pass();
}
