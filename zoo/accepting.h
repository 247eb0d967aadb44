/* A server and its clients, with a connection for each request: at nearly every moment some wait to be
 * accepted. */
#ifndef ZOO_ACCEPTING_H
#define ZOO_ACCEPTING_H

#include "zoo.h"
#include <sys/mman.h>
#include <sys/socket.h>

/* Asks and is answered, on a connection of its own each time. */
static void accepting_client(int (*dial)(const void *), const void *name, volatile int *served, volatile int *done)
{
	char c;

	while (!*done) {
		int fd = dial(name);

		CHECK_EQ(send(fd, "?", 1, 0), 1);
		CHECK_EQ(recv(fd, &c, 1, 0), 1);
		CHECK_EQ(c, '!');
		TRY(close(fd));
		++*served;
	}
	_exit(0);
}

static void accepting_serve(int listener)
{
	char c;

	for (;;) {
		int fd = TRY(accept(listener, NULL, NULL));

		CHECK_EQ(recv(fd, &c, 1, 0), 1);
		zoo_sleep_ms(1);
		CHECK_EQ(send(fd, "!", 1, 0), 1);
		TRY(close(fd));
	}
}

/* Before and after the harness has done its work each of the clients is served, again and again. If the
 * server is ALONE nobody else has the listener. */
static void accepting(int listener, bool alone, int (*dial)(const void *), const void *name)
{
	volatile int *shared = zoo_map(4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1);
	pid_t pids[4], server;
	int before;

	server = TRY(fork());
	if (!server)
		accepting_serve(listener);
	if (alone)
		TRY(close(listener));
	for (int i = 0; i < 4; i++) {
		pids[i] = TRY(fork());
		if (!pids[i])
			accepting_client(dial, name, &shared[i], &shared[8]);
	}
	for (int i = 0; i < 4; i++)
		WAIT_UNTIL(shared[i] > 3);
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 4; i++) {
		before = shared[i];
		WAIT_UNTIL(shared[i] > before + 2);
	}
	shared[8] = 1;
	for (int i = 0; i < 4; i++)
		CHECK_EXIT(pids[i], 0);
	TRY(kill(server, SIGKILL));
	TRY(waitpid(server, NULL, 0));
	zoo_pass();
}

#endif
