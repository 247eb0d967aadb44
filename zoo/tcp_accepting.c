// area: TCP
// shows: a server with connections that wait to be accepted at nearly every moment: all of them are served
// options: --tcp-established
// modes: plain leave-running ns
// varies: fd
#include "zoo.h"
#include "tcp.h"
#include <sys/mman.h>

/* Asks and is answered, on a connection of its own each time. */
static void client(const union tcp_name *name, volatile int *served, volatile int *done)
{
	char c;

	while (!*done) {
		int fd = tcp_dial(name);

		CHECK_EQ(send(fd, "?", 1, 0), 1);
		CHECK_EQ(recv(fd, &c, 1, 0), 1);
		CHECK_EQ(c, '!');
		TRY(close(fd));
		++*served;
	}
	_exit(0);
}

int main(void)
{
	volatile int *shared = zoo_map(4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1);
	union tcp_name name;
	int listener = tcp_listen(AF_INET, &name), before = 0;
	pid_t pids[4], server;

	server = TRY(fork());
	if (!server) {
		char c;

		for (;;) {
			int fd = TRY(accept(listener, NULL, NULL));

			CHECK_EQ(recv(fd, &c, 1, 0), 1);
			zoo_sleep_ms(1);
			CHECK_EQ(send(fd, "!", 1, 0), 1);
			TRY(close(fd));
		}
	}
	for (int i = 0; i < 4; i++) {
		pids[i] = TRY(fork());
		if (!pids[i])
			client(&name, &shared[i], &shared[8]);
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
