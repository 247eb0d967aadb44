// area: refusals
// shows: a semaphore that goes down when a process of two threads ends (SEM_UNDO) is refused with --strict
// dump: --strict
// modes: ns
// build: -pthread
// expect: refused "SEM_UNDO"
#include "semaphores.h"
#include <pthread.h>

static int id;

static void *other(void *unused)
{
	change(id, 2, 1, SEM_UNDO);
	zoo_ready();
	zoo_wait();
	return unused;
}

int main(void)
{
	pthread_t thread;

	id = semaphores();
	CHECK(!pthread_create(&thread, NULL, other, NULL));
	CHECK(!pthread_join(thread, NULL));
	CHECK_EQ(semctl(id, 2, GETVAL), 16385);
	change(id, 2, -1, SEM_UNDO);
	TRY(semctl(id, 0, IPC_RMID));
	zoo_pass();
}
