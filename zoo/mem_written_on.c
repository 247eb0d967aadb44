// area: memory
// shows: memory that is written, shared, replaced and given back all the time is of one moment
// build: -pthread
// varies: maps smaps
// foreign: yes
#include "zoo.h"
#include <pthread.h>

#define PAGES 4096
#define PAGE 4096

/* One of each writes all of its pages in turn, with a number that grows with each round. */
static unsigned long *own, *shared;
static volatile unsigned long rounds, replaced;

static unsigned long *page(unsigned long *memory, unsigned long i)
{
	return memory + i * (PAGE / sizeof *memory);
}

/* Whatever it finds in a page must be what it wrote there in the round before. */
static void *write_on(void *arg)
{
	for (unsigned long round = 1; !zoo_go(); round++, rounds++) {
		for (unsigned long i = 0; i < PAGES; i++) {
			if (*page(own, i) != round - 1 || *page(shared, i) != round - 1)
				zoo_fail("page %lu has %lu and %lu in round %lu", i, *page(own, i),
					 *page(shared, i), round);
			*page(own, i) = round;
			*page(shared, i) = round;
		}
	}
	return arg;
}

/* Fills memory, gives it back and takes new one, at the same place or at another. */
static void *replace(void *arg)
{
	for (unsigned long n = 1; !zoo_go(); n++, replaced++) {
		unsigned long *memory = mmap(NULL, 64 * PAGE, PROT_READ | PROT_WRITE,
					     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		for (unsigned long i = 0; i < 64; i++)
			*page(memory, i) = n + i;
		sched_yield();
		for (unsigned long i = 0; i < 64; i++)
			if (*page(memory, i) != n + i)
				zoo_fail("page %lu has %lu, not %lu", i, *page(memory, i), n + i);
		munmap(memory, 64 * PAGE);
	}
	return arg;
}

/* There is no child but those that the program has made itself: none. */
static void *look(void *arg)
{
	while (!zoo_go()) {
		if (waitpid(-1, NULL, WNOHANG) != -1 || errno != ECHILD)
			zoo_fail("there is a child that nobody made");
		zoo_sleep_ms(1);
	}
	return arg;
}

int main(void)
{
	void *(*work[])(void *) = { write_on, replace, look };
	pthread_t threads[3];

	own = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	shared = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	for (int i = 0; i < 3; i++)
		if (pthread_create(&threads[i], NULL, work[i], NULL))
			zoo_fail("pthread_create");
	WAIT_UNTIL(rounds > 2 && replaced > 2);
	zoo_ready();
	for (int i = 0; i < 3; i++)
		pthread_join(threads[i], NULL);
	zoo_pass();
}
