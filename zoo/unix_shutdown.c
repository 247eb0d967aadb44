// area: Unix sockets
// shows: half and full shutdown of stream and datagram pairs, with data left; a pair whose peer is closed
// foreign: yes
#include "zoo.h"
#include <sys/socket.h>

int main(void)
{
	int how[] = { SHUT_RD, SHUT_WR, SHUT_RDWR }, s[3][2], d[3][2], lone[2];
	char text[8];

	signal(SIGPIPE, SIG_IGN);
	for (int i = 0; i < 3; i++) {
		TRY(socketpair(AF_UNIX, SOCK_STREAM, 0, s[i]));
		TRY(socketpair(AF_UNIX, SOCK_DGRAM, 0, d[i]));
		CHECK_EQ(write(s[i][0], "data", 4), 4);
		TRY(shutdown(s[i][0], how[i]));
		TRY(shutdown(d[i][0], how[i]));
	}
	TRY(socketpair(AF_UNIX, SOCK_STREAM, 0, lone));
	CHECK_EQ(write(lone[1], "left", 4), 4);
	TRY(close(lone[1]));
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 3; i++) {
		bool reads = how[i] != SHUT_RD && how[i] != SHUT_RDWR, writes = how[i] == SHUT_RD;

		CHECK_EQ(read(s[i][1], text, 8), 4);
		CHECK(memcmp(text, "data", 4) == 0);
		CHECK_EQ(write(s[i][0], "x", 1), writes ? 1 : -1);
		if (!writes) {
			CHECK_EQ(errno, EPIPE);
			CHECK_EQ(read(s[i][1], text, 1), 0);
		}
		CHECK_EQ(write(s[i][1], "y", 1), reads ? 1 : -1);
		CHECK_EQ(read(s[i][0], text, 1), reads ? 1 : 0);
		CHECK_EQ(write(d[i][0], "x", 1), writes ? 1 : -1);
		if (!reads)
			CHECK(write(d[i][1], "y", 1) < 0 && errno == EPIPE);
	}
	CHECK_EQ(read(lone[0], text, 8), 4);
	CHECK_EQ(read(lone[0], text, 8), 0);
	CHECK(write(lone[0], "x", 1) < 0 && errno == EPIPE);
	zoo_pass();
}
