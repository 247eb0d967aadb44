// area: threads
// shows: threads that compute in registers and sleep in turns all go on
// foreign: yes
#include "zoo.h"
#include <pthread.h>

#define THREADS 4

static volatile unsigned long counters[THREADS];
static volatile bool stop;

static void *work(void *arg)
{
	unsigned long n = (unsigned long)arg, a = n + 1, b = n + 1;

	/* Two copies of a computation must never part. */
	while (!stop) {
		for (int i = 0; i < 1000; i++) {
			a = a * 6364136223846793005u + 1442695040888963407u;
			__asm__ volatile("" : "+r"(a));
			b = b * 6364136223846793005u + 1442695040888963407u;
			__asm__ volatile("" : "+r"(b));
		}
		CHECK(a == b);
		counters[n]++;
		if (n & 1)
			zoo_sleep_ms(1);
	}
	return NULL;
}

int main(void)
{
	pthread_t threads[THREADS];

	for (unsigned long i = 0; i < THREADS; i++)
		CHECK(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
	/* A thread that is being made has all signals blocked. */
	for (int i = 0; i < THREADS; i++)
		WAIT_UNTIL(counters[i]);
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < THREADS; i++) {
		unsigned long seen = counters[i];

		WAIT_UNTIL(counters[i] != seen);
	}
	stop = true;
	for (int i = 0; i < THREADS; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	zoo_pass();
}
