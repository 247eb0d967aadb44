/* Answers each byte of each client with the same byte, and each client in a process of its own: as a service in a
 * container does whose address moves with it. The argument is the port.
 */
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static void answer(int client)
{
	static char buffer[65536];
	ssize_t len;

	while ((len = read(client, buffer, sizeof(buffer))) > 0) {
		for (ssize_t done = 0, sent; done < len; done += sent) {
			sent = write(client, buffer + done, len - done);
			if (sent < 0)
				fail("write");
		}
	}
	if (len < 0)
		fail("read");
	exit(0);
}

int main(int argc, char **argv)
{
	if (argc != 2)
		return 2;
	struct sockaddr_in6 address = { .sin6_family = AF_INET6, .sin6_port = htons(atoi(argv[1])) };
	int listener = socket(AF_INET6, SOCK_STREAM, 0), yes = 1;
	if (setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)) < 0)
		fail("setsockopt");
	if (bind(listener, (struct sockaddr *)&address, sizeof(address)) < 0 || listen(listener, 16) < 0)
		fail("listen");
	for (;;) {
		int client = accept(listener, NULL, NULL);
		if (client < 0)
			fail("accept");
		pid_t child = fork();
		if (child < 0)
			fail("fork");
		if (child == 0) {
			close(listener);
			answer(client);
		}
		close(client);
	}
}
