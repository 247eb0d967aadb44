// area: System V and POSIX IPC
// shows: who has undone what semaphores do at its end (SEM_UNDO) has nothing to lose, and semaphores stay as they are
// dump: --strict
// modes: ns
// build: -pthread
#include "semaphores.h"
#include <pthread.h>

static int id;

/* A process that has a thread has a list of what is undone, here one of nothing. */
static void *other(void *unused)
{
	for (int i = 0; i < SEMAPHORES; i++) {
		int by = values[i] < 16384 ? 1 : -1;

		change(id, i, by, SEM_UNDO);
		change(id, i, -by, SEM_UNDO);
	}
	zoo_tell("thread");
	zoo_wait();
	return unused;
}

int main(void)
{
	pthread_t thread;

	id = semaphores();
	CHECK(!pthread_create(&thread, NULL, other, NULL));
	zoo_await("thread");
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < SEMAPHORES; i++)
		CHECK_EQ(semctl(id, i, GETVAL), values[i]);
	CHECK(!pthread_join(thread, NULL));
	TRY(semctl(id, 0, IPC_RMID));
	zoo_pass();
}
