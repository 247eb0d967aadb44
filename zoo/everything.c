// area: process tree
// shows: threads, timers, pipes, sockets, memory and children at work, all verified all the time
// foreign: yes
// options: --tcp-established --file-locks
// varies: fd maps timers files SigPnd ShdPnd SigBlk
#include "zoo.h"
#include "tcp.h"
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/timerfd.h>

/* Those that work count here; the main task sees that all counters go on. */
enum { MEMORY, COMPUTE, SLEEP, TIMERS, PIPES, UNIX, TCP, FILES, SHARED, SIGNALS, WORKERS };

static volatile uint64_t *beats;
static volatile bool stop;

static bool over(void)
{
	return stop || beats[WORKERS];
}

static void *memory(void *arg)
{
	size_t size = 4 << 20;
	char *area = zoo_map(size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);

	for (uint64_t round = 0; !over(); round++) {
		size_t part = round % 64 * (size / 64);

		zoo_fill(area + part, size / 64, round);
		/* What was written one lap ago everywhere else is still there. */
		for (uint64_t old = round < 63 ? 0 : round - 63; old <= round; old++)
			CHECK(zoo_filled(area + old % 64 * (size / 64), size / 64, old));
		beats[MEMORY]++;
	}
	return arg;
}

static void *compute(void *arg)
{
	double x = 0.5;
	uint64_t a = 1, b = 1;

	while (!over()) {
		double y = 0.5;

		for (int i = 0; i < 20000; i++) {
			a = a * 6364136223846793005u + 1442695040888963407u;
			__asm__ volatile("" : "+r"(a));
			b = b * 6364136223846793005u + 1442695040888963407u;
			__asm__ volatile("" : "+r"(b));
			y = 3.7 * y * (1 - y);
		}
		CHECK(a == b);
		CHECK(x == 0.5 || x == y);
		x = y;
		beats[COMPUTE]++;
	}
	return arg;
}

static void *sleeps(void *arg)
{
	while (!over()) {
		struct timespec rest = { 0, 300000 };

		CHECK(nanosleep(&rest, NULL) == 0 || errno == EINTR);
		beats[SLEEP]++;
	}
	return arg;
}

static void *timers(void *arg)
{
	struct itimerspec often = { { 0, 500000 }, { 0, 500000 } };
	int fd = TRY(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK)), set = TRY(epoll_create1(0));
	struct epoll_event ev = { .events = EPOLLIN, .data.u64 = 77 }, got;
	uint64_t ticks;

	TRY(epoll_ctl(set, EPOLL_CTL_ADD, fd, &ev));
	TRY(timerfd_settime(fd, 0, &often, NULL));
	while (!over()) {
		int n = epoll_wait(set, &got, 1, 1000);

		CHECK(n >= 0 || errno == EINTR);
		if (n == 1) {
			CHECK_EQ(got.data.u64, 77);
			CHECK_EQ(read(fd, &ticks, 8), 8);
			beats[TIMERS]++;
		}
	}
	return arg;
}

static void exactly(int fd, void *buffer, size_t len, bool out)
{
	for (size_t done = 0; done < len;) {
		char *at = (char *)buffer + done;
		ssize_t n = out ? write(fd, at, len - done) : read(fd, at, len - done);

		CHECK(n > 0 || (n < 0 && errno == EINTR));
		if (n > 0)
			done += n;
	}
}

/* Blocks go to the echoing child and come back. */
static void echo(int fd_out, int fd_in, int who)
{
	uint64_t out[512], in[512];

	for (uint64_t round = 0; !over(); round++) {
		zoo_fill(out, sizeof out, round);
		exactly(fd_out, out, sizeof out, true);
		exactly(fd_in, in, sizeof in, false);
		CHECK(memcmp(in, out, sizeof in) == 0);
		beats[who]++;
	}
}

static int links[3][2];

static void *pipes(void *arg)
{
	echo(links[0][1], links[0][0], PIPES);
	return arg;
}

static void *unix_sockets(void *arg)
{
	echo(links[1][0], links[1][0], UNIX);
	return arg;
}

static void *tcp(void *arg)
{
	echo(links[2][0], links[2][0], TCP);
	return arg;
}

static void *files(void *arg)
{
	int fd = TRY(open("everything", O_RDWR | O_CREAT | O_TRUNC, 0600)), other = TRY(open("everything", O_RDWR));
	char out[4096], in[4096];

	TRY(flock(fd, LOCK_EX));
	TRY(unlink("everything"));
	for (uint64_t round = 0; !over(); round++) {
		off_t at = (off_t)(round % 16) * 4096;

		zoo_fill(out, sizeof out, round);
		CHECK_EQ(pwrite(fd, out, sizeof out, at), sizeof out);
		CHECK_EQ(pread(other, in, sizeof in, at), sizeof in);
		CHECK(memcmp(in, out, sizeof in) == 0);
		CHECK(flock(other, LOCK_EX | LOCK_NB) < 0);
		beats[FILES]++;
	}
	return arg;
}

static void on_alarm(int sig)
{
	beats[SIGNALS] += sig == SIGALRM;
}

/* The child: sends back what comes, and computes on shared memory. */
static void child(int in, int out)
{
	int sockets[] = { links[1][1], links[2][1] };
	char block[4096];

	for (int i = 0; i < 2; i++)
		if (TRY(fork()) == 0) {
			ssize_t n;

			while ((n = read(sockets[i], block, sizeof block)) != 0)
				if (n > 0)
					exactly(sockets[i], block, n, true);
			_exit(0);
		}
	if (TRY(fork()) == 0)
		for (;;) {
			beats[SHARED]++;
			if (beats[WORKERS])
				_exit(0);
		}
	for (;;) {
		ssize_t n = read(in, block, sizeof block);

		if (n > 0)
			exactly(out, block, n, true);
		else if (n == 0 || errno != EINTR)
			break;
	}
	while (wait(NULL) > 0 || errno == EINTR)
		;
	_exit(0);
}

static void all_go_on(void)
{
	uint64_t seen[WORKERS];

	for (int i = 0; i < WORKERS; i++)
		seen[i] = beats[i];
	/* A connection goes on with its next retransmission, which may be as far away as the network was held for. */
	for (int i = 0; i < WORKERS; i++) {
		for (int left = 16000; beats[i] == seen[i]; left--) {
			if (!left)
				zoo_fail("worker %d has stopped", i);
			zoo_sleep_ms(5);
		}
	}
}

int main(void)
{
	void *(*works[])(void *) = { memory, compute, sleeps, timers, pipes, unix_sockets, tcp, files };
	struct sigaction sa = { .sa_handler = on_alarm, .sa_flags = SA_RESTART };
	struct itimerval often = { { 0, 700 }, { 0, 700 } };
	pthread_t threads[8];
	int to[2], from[2];
	pid_t pid;

	/* It never rests, so others come first: beside two such programs 3,000 calls of a process that is traced take
	 * 2.4 s, and 0.35 s if they are nice, which is as long as beside none. */
	TRY(setpriority(PRIO_PROCESS, 0, 10));
	beats = zoo_map(4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1);
	TRY(pipe(to));
	TRY(pipe(from));
	TRY(socketpair(AF_UNIX, SOCK_STREAM, 0, links[1]));
	tcp_pair(AF_INET, &links[2][0], &links[2][1]);
	pid = TRY(fork());
	if (pid == 0) {
		TRY(close(to[1]));
		TRY(close(from[0]));
		TRY(close(links[1][0]));
		TRY(close(links[2][0]));
		child(to[0], from[1]);
	}
	TRY(close(to[0]));
	TRY(close(from[1]));
	TRY(close(links[1][1]));
	TRY(close(links[2][1]));
	links[0][0] = from[0];
	links[0][1] = to[1];
	TRY(sigaction(SIGALRM, &sa, NULL));
	TRY(setitimer(ITIMER_REAL, &often, NULL));
	for (int i = 0; i < 8; i++)
		CHECK(pthread_create(&threads[i], NULL, works[i], NULL) == 0);
	all_go_on();
	zoo_ready();
	/* Whenever it is asked for, the proof that all is well is given. */
	while (!zoo_go()) {
		if (access(zoo_path("probe"), F_OK) == 0) {
			all_go_on();
			TRY(unlink(zoo_path("probe")));
		}
		zoo_sleep_ms(2);
	}
	all_go_on();
	stop = true;
	for (int i = 0; i < 8; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	beats[WORKERS] = 1;
	TRY(close(links[0][1]));
	TRY(shutdown(links[1][0], SHUT_RDWR));
	TRY(shutdown(links[2][0], SHUT_RDWR));
	CHECK_EXIT(pid, 0);
	zoo_pass();
}
