// area: descriptors in flight
// shows: descriptors queued in sockets: one, two in a message, two messages; their originals closed or kept
// foreign: yes
#include "zoo.h"
#include "scm.h"

int main(void)
{
	int types[] = { SOCK_DGRAM, SOCK_SEQPACKET, SOCK_STREAM }, socks[3][2], pipes[3][2], file, fds[4];
	char c;

	for (int i = 0; i < 3; i++) {
		TRY(socketpair(AF_UNIX, types[i], 0, socks[i]));
		TRY(pipe(pipes[i]));
		CHECK_EQ(write(pipes[i][1], "q", 1), 1);
	}
	/* The first pipe travels in two messages and is closed here, the second in one and is kept. */
	send_fds(socks[0][1], &pipes[0][0], 1);
	send_fds(socks[0][1], &pipes[0][1], 1);
	TRY(close(pipes[0][0]));
	TRY(close(pipes[0][1]));
	send_fds(socks[1][1], pipes[1], 2);
	file = TRY(open("file", O_RDWR | O_CREAT, 0600));
	CHECK_EQ(write(file, "0123456789", 10), 10);
	TRY(lseek(file, 4, SEEK_SET));
	fds[0] = file;
	fds[1] = pipes[2][0];
	send_fds(socks[2][1], fds, 2);
	TRY(close(file));
	TRY(close(pipes[2][0]));
	/* The sending end is gone as well. */
	TRY(close(socks[2][1]));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(recv_fds(socks[0][0], fds), 1);
	CHECK_EQ(recv_fds(socks[0][0], fds + 1), 1);
	CHECK_EQ(read(fds[0], &c, 1), 1);
	CHECK_EQ(write(fds[1], "w", 1), 1);
	CHECK_EQ(read(fds[0], &c, 1), 1);
	CHECK_EQ(c, 'w');
	CHECK_EQ(recv_fds(socks[1][0], fds), 2);
	CHECK_EQ(read(fds[0], &c, 1), 1);
	CHECK_EQ(c, 'q');
	CHECK_EQ(write(fds[1], "v", 1), 1);
	CHECK_EQ(read(pipes[1][0], &c, 1), 1);
	CHECK_EQ(c, 'v');
	CHECK_EQ(recv_fds(socks[2][0], fds), 2);
	CHECK_EQ(lseek(fds[0], 0, SEEK_CUR), 4);
	CHECK_EQ(read(fds[0], &c, 1), 1);
	CHECK_EQ(c, '4');
	CHECK_EQ(read(fds[1], &c, 1), 1);
	CHECK_EQ(c, 'q');
	zoo_pass();
}
