// area: System V and POSIX IPC
// shows: POSIX message queues with messages of several priorities, attributes, owner, and descriptors that share them
// modes: ns userns
// build: -lrt
#include "zoo.h"
#include <mqueue.h>

static void take(mqd_t queue, const char *expected, unsigned wanted)
{
	char text[64];
	unsigned priority;

	CHECK_EQ(mq_receive(queue, text, sizeof text, &priority), (ssize_t)strlen(expected));
	CHECK(!memcmp(text, expected, strlen(expected)));
	CHECK_EQ(priority, wanted);
}

int main(void)
{
	struct mq_attr attr = { .mq_maxmsg = 5, .mq_msgsize = 64 };
	mqd_t queue = mq_open("/zoo", O_RDWR | O_CREAT | O_EXCL, 0600, &attr), reader, unopened;
	struct stat stat;
	char text[64];
	pid_t child;

	if (queue == (mqd_t)-1)
		zoo_skip("no message queues");
	TRY(fchmod(queue, 0620));
	TRY(fchown(queue, 1, 2));
	reader = TRY(mq_open("/zoo", O_RDONLY | O_NONBLOCK));
	unopened = TRY(mq_open("/nobody", O_RDWR | O_CREAT | O_EXCL, 0600, NULL));
	TRY(mq_send(unopened, "forgotten", 9, 3));
	TRY(mq_close(unopened));
	TRY(mq_send(queue, "low", 3, 1));
	TRY(mq_send(queue, "high", 4, 9));
	TRY(mq_send(queue, "high too", 8, 9));
	TRY(mq_send(queue, "", 0, 0));
	child = TRY(fork());
	if (!child) {
		zoo_tell("child");
		zoo_wait();
		WAIT_UNTIL(!access("parent", F_OK));
		CHECK_EQ(mq_receive(queue, text, sizeof text, NULL), 4);
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	take(queue, "high", 9);
	take(reader, "high too", 9);
	take(queue, "low", 1);
	take(reader, "", 0);
	CHECK(mq_receive(reader, text, sizeof text, NULL) < 0 && errno == EAGAIN);
	TRY(mq_getattr(queue, &attr));
	CHECK_EQ(attr.mq_maxmsg, 5);
	CHECK_EQ(attr.mq_msgsize, 64);
	CHECK_EQ(attr.mq_flags, 0);
	TRY(fstat(queue, &stat));
	CHECK_EQ(stat.st_mode & 07777, 0620);
	CHECK(stat.st_uid == 1 && stat.st_gid == 2);
	TRY(mq_send(queue, "last", 4, 0));
	TRY(close(TRY(open("parent", O_CREAT | O_WRONLY, 0600))));
	CHECK_EXIT(child, 0);
	unopened = TRY(mq_open("/nobody", O_RDWR));
	TRY(mq_getattr(unopened, &attr));
	CHECK_EQ(attr.mq_curmsgs, 1);
	TRY(mq_unlink("/nobody"));
	TRY(mq_unlink("/zoo"));
	zoo_pass();
}
