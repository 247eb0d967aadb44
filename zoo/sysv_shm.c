// area: System V and POSIX IPC
// shows: shared memory segments: attached, detached, by key and by id, of odd size, with a protected page
// modes: ns userns
#include "zoo.h"
#include <sys/ipc.h>
#include <sys/shm.h>

int main(void)
{
	int attached = TRY(shmget(0x5a00, 1 << 20, IPC_CREAT | IPC_EXCL | 0640));
	int detached = TRY(shmget(IPC_PRIVATE, 12345, 0600)), doomed = TRY(shmget(IPC_PRIVATE, 8192, 0600));
	char *a = TRY(shmat(attached, NULL, 0)), *b = TRY(shmat(attached, NULL, SHM_RDONLY));
	char *d = TRY(shmat(detached, NULL, 0)), *gone = TRY(shmat(doomed, NULL, 0));
	struct shmid_ds ds;
	pid_t child;

	zoo_fill(a, 1 << 20, 1);
	zoo_fill(d, 12344, 2);
	TRY(shmdt(d));
	zoo_fill(gone, 8192, 3);
	TRY(shmctl(doomed, IPC_RMID, NULL));
	TRY(mprotect(a + 4096, 4096, PROT_READ));
	child = TRY(fork());
	if (child == 0) {
		zoo_tell("child");
		zoo_wait();
		while (a[0] != 42)
			zoo_sleep_ms(1);
		a[1] = 43;
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK(zoo_filled(a, 1 << 20, 1));
	CHECK_EQ(shmget(0x5a00, 0, 0), attached);
	a[0] = 42;
	CHECK_EXIT(child, 0);
	CHECK_EQ(b[0], 42);
	CHECK_EQ(b[1], 43);
	CHECK(zoo_filled(gone, 8192, 3));
	TRY(shmctl(detached, IPC_STAT, &ds));
	CHECK_EQ(ds.shm_segsz, 12345);
	CHECK_EQ(ds.shm_nattch, 0);
	d = TRY(shmat(detached, NULL, 0));
	CHECK(zoo_filled(d, 12344, 2));
	TRY(shmctl(attached, IPC_STAT, &ds));
	CHECK_EQ(ds.shm_perm.mode & 0777, 0640);
	TRY(shmdt(a));
	TRY(shmctl(attached, IPC_RMID, NULL));
	zoo_pass();
}
