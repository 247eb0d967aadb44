// area: refusals
// shows: an io_uring instance that has sent without copying, and was told twice of each, is refused by name
// modes: plain leave-running ns
// expect: refused "as with IORING_ACCEPT_MULTISHOT or IORING_OP_SEND_ZC"
#include "io_uring.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

/* Sends a word and gets it: one answer that it was sent, and one that its memory is free again. */
static void send_word(struct ring *ring, int fd)
{
	char word[5] = "word", got[5] = "";

	ring_add(ring, IORING_OP_SEND_ZC, fd, word, sizeof word, 0, 1);
	ring_enter(ring, 1);
	ring_expect(ring, 1, (int)sizeof word);
	CHECK_EQ(recv(fd, got, sizeof got, 0), (long)sizeof got);
	ring_expect(ring, 1, 0);
	CHECK(!strcmp(got, word));
}

int main(void)
{
	struct sockaddr_in own = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	int fd = TRY(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
	socklen_t length = sizeof own;
	struct ring ring;

	if (!ring_setup(&ring, 4, 0))
		zoo_skip("no io_uring");
	TRY(bind(fd, (void *)&own, sizeof own));
	TRY(getsockname(fd, (void *)&own, &length));
	TRY(connect(fd, (void *)&own, length));
	send_word(&ring, fd);
	zoo_ready();
	zoo_wait();
	send_word(&ring, fd);
	zoo_pass();
}
