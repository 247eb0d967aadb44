// area: Unix sockets
// shows: socket pairs of all three types with queued messages in both directions, boundaries kept
// foreign: yes
#include "zoo.h"
#include <sys/socket.h>

int main(void)
{
	int types[] = { SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET }, pairs[3][2];
	char text[32];

	for (int i = 0; i < 3; i++) {
		TRY(socketpair(AF_UNIX, types[i] | (i & 1 ? SOCK_NONBLOCK : 0), 0, pairs[i]));
		for (int end = 0; end < 2; end++) {
			CHECK_EQ(write(pairs[i][end], "first", 5), 5);
			CHECK_EQ(write(pairs[i][end], "second", 6), 6);
		}
	}
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 3; i++)
		for (int end = 0; end < 2; end++) {
			ssize_t n = read(pairs[i][end], text, sizeof text);

			CHECK_EQ(fcntl(pairs[i][end], F_GETFL) & O_NONBLOCK, i & 1 ? O_NONBLOCK : 0);
			if (types[i] == SOCK_STREAM) {
				CHECK_EQ(n, 11);
				CHECK(memcmp(text, "firstsecond", 11) == 0);
			} else {
				CHECK_EQ(n, 5);
				CHECK(memcmp(text, "first", 5) == 0);
				CHECK_EQ(read(pairs[i][end], text, sizeof text), 6);
				CHECK(memcmp(text, "second", 6) == 0);
			}
			CHECK(recv(pairs[i][end], text, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN);
			CHECK_EQ(write(pairs[i][!end], "new", 3), 3);
			CHECK_EQ(read(pairs[i][end], text, sizeof text), 3);
		}
	zoo_pass();
}
