// area: threads
// shows: ten threads keep their thread-local storage, signal masks, ids and names
// foreign: yes
#include "zoo.h"
#include <pthread.h>
#include <sys/prctl.h>

#define THREADS 10

static __thread unsigned long local;
static int ready, verified;

static void *work(void *arg)
{
	unsigned long n = (unsigned long)arg;
	pid_t tid = (pid_t)syscall(SYS_gettid);
	char want[16], name[16];
	sigset_t set, now;

	local = n * 0x123456789;
	snprintf(want, sizeof want, "worker-%lu", n);
	TRY(prctl(PR_SET_NAME, want));
	sigemptyset(&set);
	sigaddset(&set, SIGRTMIN + (int)n);
	CHECK(pthread_sigmask(SIG_BLOCK, &set, NULL) == 0);
	__atomic_add_fetch(&ready, 1, __ATOMIC_SEQ_CST);
	zoo_wait();
	CHECK_EQ(local, n * 0x123456789);
	CHECK_EQ(syscall(SYS_gettid), tid);
	TRY(prctl(PR_GET_NAME, name));
	CHECK(strcmp(name, want) == 0);
	CHECK(pthread_sigmask(SIG_BLOCK, NULL, &now) == 0);
	for (int sig = SIGRTMIN; sig < SIGRTMIN + THREADS; sig++)
		CHECK_EQ(sigismember(&now, sig), sig == SIGRTMIN + (int)n);
	__atomic_add_fetch(&verified, 1, __ATOMIC_SEQ_CST);
	return NULL;
}

int main(void)
{
	pthread_t threads[THREADS];

	for (unsigned long i = 0; i < THREADS; i++)
		CHECK(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
	WAIT_UNTIL(__atomic_load_n(&ready, __ATOMIC_SEQ_CST) == THREADS);
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < THREADS; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	CHECK_EQ(verified, THREADS);
	zoo_pass();
}
