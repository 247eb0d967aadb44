// area: threads
// shows: threads that create a successor and exit without pause are all caught
// foreign: yes
// varies: thread threads maps status
#include "zoo.h"
#include <pthread.h>

#define LINES 4

static volatile unsigned long steps[LINES];
static volatile int ended;

static void *work(void *arg)
{
	unsigned long line = (unsigned long)arg;
	pthread_attr_t attr;
	pthread_t next;

	steps[line]++;
	if (zoo_go()) {
		__atomic_add_fetch(&ended, 1, __ATOMIC_SEQ_CST);
		return NULL;
	}
	pthread_attr_init(&attr);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	while (pthread_create(&next, &attr, work, arg))
		zoo_sleep_ms(1);
	return NULL;
}

int main(void)
{
	for (unsigned long i = 0; i < LINES; i++)
		work((void *)i);
	WAIT_UNTIL(steps[0] > 10 && steps[LINES - 1] > 10);
	zoo_ready();
	zoo_wait();
	WAIT_UNTIL(ended == LINES);
	zoo_pass();
}
