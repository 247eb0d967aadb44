/* Has many kinds of things, says so in the file "ready", and sleeps. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

static void must(const char *what, long result)
{
	if (result < 0) {
		perror(what);
		exit(1);
	}
}

static void *thread(void *unused)
{
	for (;;)
		pause();
	return unused;
}

int main(void)
{
	struct epoll_event event = { .events = EPOLLIN };
	struct sockaddr_in any = { .sin_family = AF_INET };
	int ends[2], epoll, tcp, udp, file;
	pthread_t other;
	sigset_t none;

	must("pipe", pipe(ends));
	must("write", write(ends[1], "x", 1));
	must("epoll", epoll = epoll_create1(0));
	must("epoll_ctl", epoll_ctl(epoll, EPOLL_CTL_ADD, ends[0], &event));
	must("eventfd", eventfd(1, 0));
	must("timerfd", timerfd_create(CLOCK_MONOTONIC, 0));
	sigemptyset(&none);
	must("signalfd", signalfd(-1, &none, 0));
	must("inotify", inotify_add_watch(inotify_init1(0), ".", IN_CREATE));
	must("socketpair", socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
	must("write", write(ends[1], "x", 1));
	must("tcp", tcp = socket(AF_INET, SOCK_STREAM, 0));
	must("bind", bind(tcp, (void *)&any, sizeof any));
	must("listen", listen(tcp, 1));
	must("udp", udp = socket(AF_INET, SOCK_DGRAM, 0));
	must("bind", bind(udp, (void *)&any, sizeof any));
	must("memfd", ftruncate(memfd_create("memory", 0), 4096));
	must("file", file = open("file", O_CREAT | O_RDWR, 0600));
	must("write", write(file, "text", 4));
	must("unlinked", open("gone", O_CREAT | O_RDWR, 0600));
	must("unlink", unlink("gone"));
	mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, file, 0);
	pthread_create(&other, NULL, thread, NULL);
	must("terminal", grantpt(posix_openpt(O_RDWR | O_NOCTTY)));
	if (fork() == 0)
		thread(NULL);
	must("ready", open("ready", O_CREAT | O_WRONLY, 0600));
	thread(NULL);
}
