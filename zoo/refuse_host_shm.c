// area: refusals
// shows: shared memory of the host's IPC namespace is refused, with what to do, for AFL too
// modes: plain leave-running
// expect: refused "start the tree in one of its own (unshare --ipc, afl-fuzz in it)"
#include "zoo.h"
#include <sys/ipc.h>
#include <sys/shm.h>

int main(void)
{
	int id = TRY(shmget(IPC_PRIVATE, 4096, 0600));
	char *at = shmat(id, NULL, 0);

	CHECK(at != (void *)-1);
	/* It goes with this program. */
	TRY(shmctl(id, IPC_RMID, NULL));
	*at = 'x';
	zoo_ready();
	zoo_wait();
	CHECK_EQ(*at, 'x');
	zoo_pass();
}
