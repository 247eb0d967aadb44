// area: System V and POSIX IPC
// shows: a message queue with messages of several types, by key and id
// modes: ns userns
#include "zoo.h"
#include <sys/ipc.h>
#include <sys/msg.h>

struct message {
	long type;
	char text[32];
};

int main(void)
{
	int id = TRY(msgget(0x5a03, IPC_CREAT | IPC_EXCL | 0600));
	struct message one = { 1, "first" }, two = { 7, "second, longer" }, got;

	TRY(msgsnd(id, &one, 5, 0));
	TRY(msgsnd(id, &two, 14, 0));
	TRY(msgsnd(id, &one, 0, 0));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(msgget(0x5a03, 0), id);
	CHECK_EQ(msgrcv(id, &got, 32, 7, IPC_NOWAIT), 14);
	CHECK(memcmp(got.text, "second, longer", 14) == 0);
	CHECK_EQ(msgrcv(id, &got, 32, 1, IPC_NOWAIT), 5);
	CHECK(memcmp(got.text, "first", 5) == 0);
	CHECK_EQ(msgrcv(id, &got, 32, 0, IPC_NOWAIT), 0);
	CHECK(msgrcv(id, &got, 32, 0, IPC_NOWAIT) < 0 && errno == ENOMSG);
	zoo_pass();
}
