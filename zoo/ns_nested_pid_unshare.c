// area: other namespaces
// shows: a task whose children are born into a pid namespace that it has made (unshare(2)) but does
//   not live in, before and after
// modes: plain leave-running pidns ns
// foreign: no CRIU keeps no pid namespaces within the tree
#include "zoo.h"

/* A child in the new namespace. Its first one ends last: that is the end of all others in there. */
static pid_t born(const char *name, int number, const char *last, int code)
{
	pid_t child = TRY(fork());

	if (child)
		return child;
	CHECK(number ? getpid() == number : getpid() > 2);
	CHECK_EQ(getppid(), 0);
	zoo_tell(name);
	zoo_wait();
	CHECK(number ? getpid() == number : getpid() > 2);
	CHECK_EQ(getppid(), 0);
	zoo_await(last);
	_exit(code);
}

int main(void)
{
	pid_t before = TRY(fork()), first, second, third;

	if (before == 0) {
		zoo_wait();
		_exit(getppid() != 0 ? 3 : 1);
	}
	TRY(unshare(CLONE_NEWPID));
	first = born("first", 1, "others-gone", 4);
	zoo_await("first");
	second = born("second", 2, "third", 5);
	zoo_await("second");
	zoo_ready();
	zoo_wait();
	third = born("third", 0, "third", 6);
	zoo_await("third");
	CHECK_EXIT(before, 3);
	CHECK_EXIT(third, 6);
	CHECK_EXIT(second, 5);
	zoo_tell("others-gone");
	CHECK_EXIT(first, 4);
	zoo_pass();
}
