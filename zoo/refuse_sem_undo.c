// area: refusals
// shows: semaphores that change when a task ends (SEM_UNDO) are refused with --strict
// dump: --strict
// modes: ns
// expect: refused "SEM_UNDO"
#include "semaphores.h"

int main(void)
{
	int id = semaphores();
	pid_t child = TRY(fork());

	if (!child) {
		change(id, 4, -1, SEM_UNDO);
		zoo_tell("child");
		zoo_wait();
		_exit(7);
	}
	zoo_await("child");
	CHECK_EQ(semctl(id, 4, GETVAL), 2);
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 7);
	/* It came back as it had been noted, no more and no less. */
	CHECK_EQ(semctl(id, 4, GETVAL), 3);
	TRY(semctl(id, 0, IPC_RMID));
	zoo_pass();
}
