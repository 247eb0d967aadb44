// area: refusals
// shows: a descriptor table that sisters share, and their parent does not, is refused
// expect: refused "shared with another process, but not with its parent"
#include "zoo.h"

static char stacks[2][65536];

static int waits(void *arg)
{
	zoo_tell(arg);
	zoo_await("over");
	return 0;
}

static int bears(void *arg)
{
	TRY(clone(waits, stacks[1] + sizeof stacks[1], CLONE_FILES | CLONE_PARENT, "younger"));
	return waits(arg);
}

int main(void)
{
	int statuses[2];

	TRY(clone(bears, stacks[0] + sizeof stacks[0], CLONE_FILES | SIGCHLD, "elder"));
	zoo_await("elder");
	zoo_await("younger");
	TRY(unshare(CLONE_FILES));
	zoo_ready();
	zoo_wait();
	zoo_tell("over");
	TRY(wait(&statuses[0]));
	TRY(wait(&statuses[1]));
	CHECK_EQ(statuses[0], 0);
	CHECK_EQ(statuses[1], 0);
	zoo_pass();
}
