// area: TCP
// shows: FIN_WAIT1 and LAST_ACK: connections closed with more data unsent than the peer takes
// foreign: yes
// options: --tcp-established
#include "zoo.h"
#include "tcp.h"

static size_t fill(int fd)
{
	static char block[65536];
	size_t total = 0;

	for (int quiet = 0; quiet < 10;) {
		ssize_t n = send(fd, block, sizeof block, MSG_DONTWAIT);

		if (n < 0) {
			zoo_sleep_ms(5);
			quiet++;
		} else
			total += n;
	}
	return total;
}

static size_t drain(int fd)
{
	static char block[65536];
	size_t total = 0;
	ssize_t n;

	while ((n = recv(fd, block, sizeof block, 0)) > 0)
		total += n;
	CHECK_EQ(n, 0);
	return total;
}

int main(void)
{
	int a[2], b[2];
	size_t sent_a, sent_b;

	tcp_pair(AF_INET, &a[0], &a[1]);
	sent_a = fill(a[0]);
	TRY(shutdown(a[0], SHUT_WR));
	CHECK_EQ(tcp_state(a[0]), TCP_FIN_WAIT1);
	tcp_pair(AF_INET, &b[0], &b[1]);
	sent_b = fill(b[0]);
	TRY(shutdown(b[1], SHUT_WR));
	WAIT_UNTIL(tcp_state(b[0]) == TCP_CLOSE_WAIT);
	TRY(shutdown(b[0], SHUT_WR));
	CHECK_EQ(tcp_state(b[0]), TCP_LAST_ACK);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(tcp_state(a[0]), TCP_FIN_WAIT1);
	CHECK_EQ(drain(a[1]), sent_a);
	CHECK_EQ(send(a[1], "still", 5, 0), 5);
	TRY(close(a[1]));
	CHECK_EQ(drain(a[0]), 5);
	CHECK_EQ(drain(b[1]), sent_b);
	CHECK_EQ(drain(b[0]), 0);
	zoo_pass();
}
