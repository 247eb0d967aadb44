// area: System V and POSIX IPC
// shows: a semaphore whose operation is to be undone at the task's end
// modes: ns userns
// expect: refused "undo"
#include "zoo.h"
#include <sys/ipc.h>
#include <sys/sem.h>

int main(void)
{
	int id = TRY(semget(0x5a02, 1, IPC_CREAT | IPC_EXCL | 0600));
	struct sembuf op = { 0, -1, SEM_UNDO };
	pid_t child;

	TRY(semctl(id, 0, SETVAL, 1));
	child = TRY(fork());
	if (child == 0) {
		TRY(semop(id, &op, 1));
		zoo_tell("child");
		zoo_wait();
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 0);
	CHECK_EQ(semctl(id, 0, GETVAL), 1);
	zoo_pass();
}
