// area: futex and rseq
// shows: robust lists of both threads are registered as before, and do their work at the end of a thread
// foreign: yes
#include "zoo.h"
#include <pthread.h>

static pthread_mutex_t mutex;
static void *heads[2];
static size_t lengths[2];

static void verify(int n)
{
	void *head;
	size_t length;

	TRY(syscall(SYS_get_robust_list, 0, &head, &length));
	CHECK(head == heads[n] && head);
	CHECK_EQ(length, lengths[n]);
}

static void *work(void *arg)
{
	TRY(syscall(SYS_get_robust_list, 0, &heads[1], &lengths[1]));
	pthread_mutex_lock(&mutex);
	zoo_tell("thread");
	zoo_wait();
	verify(1);
	/* Ends with the mutex held. */
	return arg;
}

int main(void)
{
	pthread_mutexattr_t attr;
	pthread_t thread;

	pthread_mutexattr_init(&attr);
	pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
	pthread_mutex_init(&mutex, &attr);
	TRY(syscall(SYS_get_robust_list, 0, &heads[0], &lengths[0]));
	CHECK(pthread_create(&thread, NULL, work, NULL) == 0);
	zoo_await("thread");
	zoo_ready();
	zoo_wait();
	verify(0);
	CHECK(pthread_join(thread, NULL) == 0);
	CHECK_EQ(pthread_mutex_lock(&mutex), EOWNERDEAD);
	zoo_pass();
}
