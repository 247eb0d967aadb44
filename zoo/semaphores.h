/* A set of System V semaphores with values from one end to the other. */
#ifndef ZOO_SEMAPHORES_H
#define ZOO_SEMAPHORES_H

#include "zoo.h"
#include <sys/ipc.h>
#include <sys/sem.h>

enum { SEMAPHORES = 5 };

static const int values[SEMAPHORES] = { 0, 16383, 16384, 32767, 3 };

static inline int semaphores(void)
{
	int id = TRY(semget(IPC_PRIVATE, SEMAPHORES, 0600));

	for (int i = 0; i < SEMAPHORES; i++)
		TRY(semctl(id, i, SETVAL, values[i]));
	return id;
}

static inline void change(int id, int number, int by, int flags)
{
	struct sembuf op = { (unsigned short)number, (short)by, (short)(flags | IPC_NOWAIT) };

	TRY(semop(id, &op, 1));
}

#endif
