/* Holds a secret in memory, in a pipe, in a socket and in a file without a name; tells
 * by its status whether it still has them. The secret is the argument, which is
 * overwritten, spelled backwards. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

static char secret[64];

static int holds(int fd)
{
	char got[sizeof(secret)] = "";

	return read(fd, got, sizeof(got)) == sizeof(got) && !memcmp(got, secret, sizeof(got));
}

int main(int argc, char **argv)
{
	int pipes[2], pair[2], ghost, ok;
	size_t len = strlen(argv[1]), pages = 300;
	char *memory;
	sigset_t set;
	int got;

	(void)argc;
	setsid();
	for (size_t i = 0; i < len; i++)
		secret[i] = argv[1][len - 1 - i];
	memory = mmap(NULL, pages * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	for (size_t i = 0; i < pages; i++)
		memcpy(memory + i * 4096, secret, sizeof(secret));
	if (pipe(pipes) || socketpair(AF_UNIX, SOCK_DGRAM, 0, pair))
		return 1;
	ghost = open(argv[2], O_RDWR | O_CREAT | O_EXCL, 0600);
	if (ghost < 0 || unlink(argv[2]))
		return 1;
	if (write(pipes[1], secret, sizeof(secret)) < 0 || write(pair[1], secret, sizeof(secret)) < 0 ||
	    write(ghost, secret, sizeof(secret)) < 0)
		return 1;
	lseek(ghost, 0, SEEK_SET);
	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	sigprocmask(SIG_BLOCK, &set, NULL);
	puts("ready");
	fclose(stdout);
	sigwait(&set, &got);
	ok = holds(pipes[0]) && holds(pair[0]) && holds(ghost);
	for (size_t i = 0; i < pages; i++)
		ok = ok && !memcmp(memory + i * 4096, secret, sizeof(secret));
	return ok ? 42 : 1;
}
