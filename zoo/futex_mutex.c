// area: futex and rseq
// shows: ten threads that wait for a mutex stay waiting, and all get it after its unlock
// foreign: yes
#include "zoo.h"
#include <pthread.h>

#define THREADS 10

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int waiting, got;

static void *work(void *arg)
{
	__atomic_add_fetch(&waiting, 1, __ATOMIC_SEQ_CST);
	pthread_mutex_lock(&mutex);
	got++;
	pthread_mutex_unlock(&mutex);
	return arg;
}

int main(void)
{
	pthread_t threads[THREADS];

	pthread_mutex_lock(&mutex);
	for (int i = 0; i < THREADS; i++)
		CHECK(pthread_create(&threads[i], NULL, work, NULL) == 0);
	WAIT_UNTIL(__atomic_load_n(&waiting, __ATOMIC_SEQ_CST) == THREADS);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(got, 0);
	pthread_mutex_unlock(&mutex);
	for (int i = 0; i < THREADS; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	CHECK_EQ(got, THREADS);
	zoo_pass();
}
