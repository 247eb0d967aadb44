// area: threads
// shows: 200 threads
// foreign: yes
#include "zoo.h"
#include <pthread.h>

#define THREADS 200

static int ready;

static void *work(void *arg)
{
	__atomic_add_fetch(&ready, 1, __ATOMIC_SEQ_CST);
	while (!zoo_go())
		zoo_sleep_ms(50);
	return arg;
}

int main(void)
{
	pthread_t threads[THREADS];
	pthread_attr_t attr;

	pthread_attr_init(&attr);
	pthread_attr_setstacksize(&attr, 64 << 10);
	for (unsigned long i = 0; i < THREADS; i++)
		CHECK(pthread_create(&threads[i], &attr, work, (void *)i) == 0);
	WAIT_UNTIL(__atomic_load_n(&ready, __ATOMIC_SEQ_CST) == THREADS);
	zoo_ready();
	zoo_wait();
	for (unsigned long i = 0; i < THREADS; i++) {
		void *value;

		CHECK(pthread_join(threads[i], &value) == 0);
		CHECK_EQ((unsigned long)value, i);
	}
	zoo_pass();
}
