// area: System V and POSIX IPC
// shows: a POSIX message queue whose next message a task waits to be told of is refused
// modes: ns
// expect: refused "mq_notify"
// build: -lrt
#include "zoo.h"
#include <mqueue.h>

int main(void)
{
	struct sigevent event = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1 };
	mqd_t queue = mq_open("/zoo", O_RDWR | O_CREAT | O_EXCL, 0600, NULL);

	if (queue == (mqd_t)-1)
		zoo_skip("no message queues");
	signal(SIGUSR1, SIG_IGN);
	TRY(mq_notify(queue, &event));
	zoo_ready();
	zoo_wait();
	TRY(mq_unlink("/zoo"));
	zoo_pass();
}
