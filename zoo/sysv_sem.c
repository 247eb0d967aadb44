// area: System V and POSIX IPC
// shows: semaphores: values, key, id; operations work
// modes: ns userns
#include "zoo.h"
#include <sys/ipc.h>
#include <sys/sem.h>

int main(void)
{
	int id = TRY(semget(0x5a01, 10, IPC_CREAT | IPC_EXCL | 0622));
	struct sembuf op = { 3, -33, IPC_NOWAIT };

	for (int i = 0; i < 10; i++)
		TRY(semctl(id, i, SETVAL, i * 11));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(semget(0x5a01, 0, 0), id);
	for (int i = 0; i < 10; i++)
		CHECK_EQ(semctl(id, i, GETVAL), i * 11);
	TRY(semop(id, &op, 1));
	CHECK(semop(id, &op, 1) < 0 && errno == EAGAIN);
	TRY(semctl(id, 0, IPC_RMID));
	zoo_pass();
}
