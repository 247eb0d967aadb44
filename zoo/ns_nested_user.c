// area: other namespaces
// shows: a user namespace inside of the tree is refused by name
// modes: plain ns
// expect: refused "its user namespace: is another one"
#include "zoo.h"

int main(void)
{
	pid_t child = TRY(fork());

	if (!child) {
		TRY(unshare(CLONE_NEWUSER));
		zoo_tell("child");
		zoo_wait();
		_exit(3);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 3);
	zoo_pass();
}
