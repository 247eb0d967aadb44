/*
 * A server and a client of it in two processes, which have one connection over loopback for as
 * long as they live: each ends when it breaks. The server counts in /count what comes through it,
 * answers others as well, and makes /left when one of those is gone.
 */
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#define PORT 7000
#define MOST 16

static void check(int done, const char *what)
{
	if (done < 0) {
		perror(what);
		exit(1);
	}
}

static void client(const struct sockaddr_in *at)
{
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	long answer;

	check(connect(fd, (void *)at, sizeof(*at)), "connect");
	for (long number = 1;; number++) {
		if (write(fd, &number, sizeof(number)) != sizeof(number) ||
		    recv(fd, &answer, sizeof(answer), MSG_WAITALL) != sizeof(answer) || answer != number)
			check(-1, "client");
	}
}

int main(void)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(PORT),
				  .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	struct pollfd fds[MOST] = { { .fd = socket(AF_INET, SOCK_STREAM, 0), .events = POLLIN } };
	int count = open("/count", O_RDWR | O_CREAT | O_TRUNC, 0644), open_fds = 1;
	long number;

	check(bind(fds[0].fd, (void *)&at, sizeof(at)), "bind");
	check(listen(fds[0].fd, 8), "listen");
	if (fork() == 0)
		client(&at);
	for (;;) {
		check(poll(fds, open_fds, -1), "poll");
		if (fds[0].revents && open_fds < MOST)
			fds[open_fds++] = (struct pollfd){ .fd = accept(fds[0].fd, NULL, NULL), .events = POLLIN };
		/* The first one is the client's: nobody else knows of the port by then. */
		for (int i = 1; i < open_fds; i++) {
			if (!fds[i].revents)
				continue;
			ssize_t got = recv(fds[i].fd, &number, sizeof(number), 0);
			if (got > 0 && write(fds[i].fd, &number, got) == got) {
				if (i == 1)
					check(pwrite(count, &number, sizeof(number), 0), "/count");
				continue;
			}
			if (i == 1)
				check(-1, "server");
			close(fds[i].fd);
			fds[i--] = fds[--open_fds];
			close(creat("/left", 0644));
		}
	}
}
