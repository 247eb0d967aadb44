// area: Unix sockets
// shows: SO_PEERCRED of connections: who listened, who connected, as which user
// foreign: no CRIU's images do not have the ids of peers
#include "zoo.h"
#include <sys/socket.h>
#include <sys/un.h>

static void expect(int fd, pid_t pid, uid_t uid)
{
	struct ucred peer;
	socklen_t len = sizeof peer;

	TRY(getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len));
	CHECK_EQ(peer.pid, pid);
	CHECK_EQ(peer.uid, uid);
	CHECK_EQ(peer.gid, uid);
}

/* More than are made to listen at once. */
enum { MANY = 70 };

static struct sockaddr_un nth(int i)
{
	struct sockaddr_un name = { AF_UNIX, "" };

	snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "zoo-peercred-%d", i);
	return name;
}

static void listen_often(int listeners[MANY])
{
	for (int i = 0; i < MANY; i++) {
		struct sockaddr_un name = nth(i);

		listeners[i] = TRY(socket(AF_UNIX, SOCK_STREAM, 0));
		TRY(bind(listeners[i], (void *)&name, sizeof name));
		TRY(listen(listeners[i], 1 + i % 3));
	}
}

/* Each takes as many as it may have waiting, and one more: that is how the kernel counts. */
static void meet_often(void)
{
	for (int i = 0; i < MANY; i++) {
		struct sockaddr_un name = nth(i);
		int fd, taken = 0;

		while (fd = TRY(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0)),
		       connect(fd, (void *)&name, sizeof name) == 0) {
			expect(fd, getpid(), 0);
			taken++;
		}
		CHECK_EQ(taken, 2 + i % 3);
		TRY(close(fd));
	}
}

int main(void)
{
	struct sockaddr_un names[2] = { { AF_UNIX, "listener" }, { AF_UNIX, "" } };
	int listeners[2], clients[2], servers[2], pair[2], many[MANY];
	uid_t user = 7, before;
	struct ucred peer;
	socklen_t len = sizeof peer;
	pid_t child;

	memcpy(names[1].sun_path, "\0zoo-peercred", 13);
	for (int i = 0; i < 2; i++) {
		listeners[i] = TRY(socket(AF_UNIX, i ? SOCK_SEQPACKET : SOCK_STREAM, 0));
		clients[i] = TRY(socket(AF_UNIX, i ? SOCK_SEQPACKET : SOCK_STREAM, 0));
		TRY(bind(listeners[i], (void *)&names[i], sizeof names[i]));
		TRY(listen(listeners[i], 5));
	}
	listen_often(many);
	child = TRY(fork());
	if (child == 0) {
		TRY(connect(clients[0], (void *)&names[0], sizeof names[0]));
		if (setresgid(-1, user, -1) || setresuid(-1, user, -1))
			user = 0; /* A user namespace may have no other. */
		TRY(connect(clients[1], (void *)&names[1], sizeof names[1]));
		TRY(setresuid(-1, 0, -1));
		TRY(setresgid(-1, 0, -1));
		zoo_tell("connected");
		zoo_wait();
		expect(clients[0], getppid(), 0);
		_exit(0);
	}
	zoo_await("connected");
	for (int i = 0; i < 2; i++)
		servers[i] = TRY(accept(listeners[i], NULL, NULL));
	TRY(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
	TRY(getsockopt(servers[1], SOL_SOCKET, SO_PEERCRED, &peer, &len));
	before = peer.uid;
	zoo_ready();
	zoo_wait();
	expect(servers[0], child, 0);
	expect(servers[1], child, before);
	for (int i = 0; i < 2; i++) {
		expect(clients[i], getpid(), 0);
		expect(pair[i], getpid(), 0);
		CHECK_EQ(write(clients[i], "x", 1), 1);
		CHECK_EQ(read(servers[i], names, 1), 1);
	}
	meet_often();
	CHECK_EXIT(child, 0);
	zoo_pass();
}
