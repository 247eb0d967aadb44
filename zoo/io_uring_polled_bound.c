// area: asynchronous I/O
// shows: the processor that the thread which fetches requests of an io_uring instance is bound to
// foreign: no CRIU keeps no io_uring
#include "io_uring.h"
#include <dirent.h>

/* The last processor of this program; -1 if there is no other. */
static int last(void)
{
	cpu_set_t all;
	int found = -1;

	TRY(sched_getaffinity(0, sizeof all, &all));
	for (int i = 0; i < CPU_SETSIZE; i++)
		if (CPU_ISSET(i, &all))
			found = i;
	return CPU_COUNT(&all) > 1 ? found : -1;
}

/* Where the threads of the kernel that work for this program may run; returns how many there are. */
static int check(int processor)
{
	DIR *threads = opendir("/proc/self/task");
	struct dirent *thread;
	char path[300], wanted[64];
	int count = 0;

	snprintf(wanted, sizeof wanted, "Cpus_allowed_list:\t%d\n", processor);
	while ((thread = readdir(threads))) {
		snprintf(path, sizeof path, "/proc/self/task/%s/status", thread->d_name);
		if (thread->d_name[0] == '.' || !strstr(zoo_slurp(path), "Name:\tiou-sqp-"))
			continue;
		CHECK(strstr(zoo_slurp(path), wanted));
		count++;
	}
	closedir(threads);
	return count;
}

int main(void)
{
	struct io_uring_params params = { .flags = IORING_SETUP_SQPOLL | IORING_SETUP_SQ_AFF, .sq_thread_idle = 10 };
	int processor = last();
	struct ring ring;

	if (processor < 0)
		zoo_skip("one processor");
	params.sq_thread_cpu = (unsigned)processor;
	if (!ring_make(&ring, 8, &params))
		zoo_skip("no io_uring");
	/* It binds itself when it first runs. */
	WAIT_UNTIL(ring_sleeps(&ring));
	CHECK_EQ(check(processor), 1);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(check(processor), 1);
	ring_add(&ring, IORING_OP_NOP, -1, NULL, 0, 0, 1);
	ring_wake(&ring);
	WAIT_UNTIL(!ring_is_empty(&ring));
	ring_expect(&ring, 1, 0);
	zoo_pass();
}
