// area: 32-bit programs
// shows: threads with their local storage, signals, timers, pipes, robust mutexes and sleeping calls go on
// build: -m32
// varies: threads ShdPnd
// foreign: yes
#include "zoo.h"
#include <poll.h>
#include <pthread.h>
#include <sys/auxv.h>
#include <sys/personality.h>
#include <sys/time.h>

#define THREADS 4

static __thread unsigned int local;
static int fds[THREADS][2];
static volatile int begun, ended, ticks, handled;
static volatile unsigned int value;
static pthread_mutex_t mutex;
static char stack[65536];

static unsigned int segment(void)
{
	unsigned int selector;

	__asm__ volatile("mov %%gs, %0" : "=r"(selector));
	return selector;
}

static void tick(int signal)
{
	(void)signal;
	ticks++;
}

static void handle(int signal, siginfo_t *info, void *context)
{
	char here;

	(void)signal;
	(void)context;
	CHECK(&here > stack && &here < stack + sizeof stack);
	value = info->si_value.sival_int;
	handled++;
}

static void check_local(unsigned int number)
{
	CHECK_EQ(local, 0x1000 + number);
	CHECK(segment() & 3);
}

/* Sleeps in read(2). */
static void *reads(void *arg)
{
	char byte;

	local = 0x1000;
	__sync_fetch_and_add(&begun, 1);
	CHECK_EQ(read(fds[0][0], &byte, 1), 1);
	CHECK_EQ(byte, 'r');
	check_local(0);
	__sync_fetch_and_add(&ended, 1);
	return arg;
}

/* Sleeps in poll(2), which the kernel restarts by a call of its own. */
static void *polls(void *arg)
{
	struct pollfd poller = { .fd = fds[1][0], .events = POLLIN };
	int got;

	local = 0x1001;
	__sync_fetch_and_add(&begun, 1);
	while ((got = poll(&poller, 1, 3600 * 1000)) < 0 && errno == EINTR)
		;
	CHECK_EQ(got, 1);
	check_local(1);
	__sync_fetch_and_add(&ended, 1);
	return arg;
}

/* Holds a robust mutex when it ends. */
static void *holds(void *arg)
{
	char byte;

	local = 0x1002;
	__sync_fetch_and_add(&begun, 1);
	CHECK_EQ(pthread_mutex_lock(&mutex), 0);
	CHECK_EQ(write(fds[3][1], "", 1), 1);
	CHECK_EQ(read(fds[2][0], &byte, 1), 1);
	check_local(2);
	__sync_fetch_and_add(&ended, 1);
	return arg;
}

int main(void)
{
	struct sigaction ticking = { .sa_handler = tick, .sa_flags = SA_RESTART };
	struct sigaction handling = { .sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_ONSTACK };
	stack_t alternate = { .ss_sp = stack, .ss_size = sizeof stack };
	struct itimerval often = { { 0, 10000 }, { 0, 10000 } };
	unsigned long sysinfo = getauxval(AT_SYSINFO);
	unsigned int selector = segment();
	void *(*work[])(void *) = { reads, polls, holds };
	pthread_t threads[3];
	pthread_mutexattr_t robust;
	struct timespec now;
	sigset_t queued;
	char byte;
	int before, status;

	CHECK_EQ(sizeof(void *), 4);
	local = 7;
	for (int i = 0; i < THREADS; i++)
		TRY(pipe(fds[i]));
	pthread_mutexattr_init(&robust);
	pthread_mutexattr_setrobust(&robust, PTHREAD_MUTEX_ROBUST);
	pthread_mutex_init(&mutex, &robust);
	TRY(sigaltstack(&alternate, NULL));
	TRY(sigaction(SIGALRM, &ticking, NULL));
	TRY(sigaction(SIGRTMIN + 3, &handling, NULL));
	sigemptyset(&queued);
	sigaddset(&queued, SIGRTMIN + 3);
	TRY(sigprocmask(SIG_BLOCK, &queued, NULL));
	TRY(sigqueue(getpid(), SIGRTMIN + 3, (union sigval){ .sival_int = 0x12345678 }));
	for (int i = 0; i < 3; i++)
		CHECK_EQ(pthread_create(&threads[i], NULL, work[i], NULL), 0);
	CHECK_EQ(read(fds[3][0], &byte, 1), 1);
	/* A thread that is being made has all signals blocked. */
	WAIT_UNTIL(begun == 3);
	TRY(setitimer(ITIMER_REAL, &often, NULL));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(local, 7);
	CHECK_EQ(segment(), selector);
	CHECK_EQ(handled, 0);
	before = ticks;
	WAIT_UNTIL(ticks > before + 2);
	TRY(sigprocmask(SIG_UNBLOCK, &queued, NULL));
	CHECK_EQ(handled, 1);
	CHECK_EQ(value, 0x12345678);
	CHECK_EQ(ended, 0);
	for (int i = 0; i < 3; i++)
		CHECK_EQ(write(fds[i][1], "r", 1), 1);
	for (int i = 0; i < 3; i++)
		CHECK_EQ(pthread_join(threads[i], NULL), 0);
	CHECK_EQ(ended, 3);
	CHECK_EQ(pthread_mutex_lock(&mutex), EOWNERDEAD);
	CHECK_EQ(getauxval(AT_SYSINFO), sysinfo);
	TRY(clock_gettime(CLOCK_MONOTONIC, &now));
	CHECK_EQ(personality(0xffffffff) & PER_MASK, PER_LINUX);
	/* New threads and processes, and memory where the program asks for none in particular. */
	CHECK_EQ(write(fds[0][1], "r", 1), 1);
	CHECK_EQ(pthread_create(&threads[0], NULL, reads, NULL), 0);
	CHECK_EQ(pthread_join(threads[0], NULL), 0);
	CHECK(mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != MAP_FAILED);
	pid_t child = TRY(fork());
	if (!child)
		_exit(local);
	CHECK_EQ(TRY(waitpid(child, &status, 0)), child);
	CHECK_EQ(status, 7 << 8);
	zoo_pass();
}
