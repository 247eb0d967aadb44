// area: other namespaces
// shows: a child in IPC and UTS namespaces of its own: names, a message queue under a key that its parent uses as well
// modes: ns userns
#include "zoo.h"
#include <sys/msg.h>
#include <sys/utsname.h>

enum { KEY = 4711 };

struct text {
	long type;
	char text[16];
};

static int queue(const char *text)
{
	int id = TRY(msgget(KEY, IPC_CREAT | IPC_EXCL | 0600));
	struct text message = { .type = 1 };

	strcpy(message.text, text);
	TRY(msgsnd(id, &message, sizeof message.text, 0));
	return id;
}

static void verify(int id, const char *text, const char *name)
{
	struct text message;
	struct utsname names;

	CHECK_EQ(msgget(KEY, 0), id);
	CHECK_EQ(msgrcv(id, &message, sizeof message.text, 0, IPC_NOWAIT), sizeof message.text);
	CHECK(!strcmp(message.text, text));
	TRY(uname(&names));
	CHECK(!strcmp(names.nodename, name));
}

int main(void)
{
	int id = queue("parent");
	pid_t child;

	TRY(sethostname("parent", 6));
	child = TRY(fork());
	if (!child) {
		TRY(unshare(CLONE_NEWIPC | CLONE_NEWUTS));
		TRY(sethostname("child", 5));
		id = queue("child");
		zoo_tell("child");
		zoo_wait();
		verify(id, "child", "child");
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	verify(id, "parent", "parent");
	CHECK_EXIT(child, 0);
	TRY(msgctl(id, IPC_RMID, NULL));
	zoo_pass();
}
