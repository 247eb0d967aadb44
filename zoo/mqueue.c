// area: System V and POSIX IPC
// shows: a POSIX message queue with messages is refused
// modes: ns userns
// expect: refused "message queue"
// build: -lrt
#include "zoo.h"
#include <mqueue.h>

int main(void)
{
	struct mq_attr attr = { .mq_maxmsg = 5, .mq_msgsize = 64 };
	mqd_t queue = mq_open("/zoo", O_RDWR | O_CREAT | O_EXCL, 0600, &attr);
	char text[64];
	unsigned priority;

	if (queue == (mqd_t)-1)
		zoo_skip("no message queues");
	TRY(mq_send(queue, "low", 3, 1));
	TRY(mq_send(queue, "high", 4, 9));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(mq_receive(queue, text, 64, &priority), 4);
	CHECK_EQ(priority, 9);
	CHECK_EQ(mq_receive(queue, text, 64, &priority), 3);
	TRY(mq_unlink("/zoo"));
	zoo_pass();
}
