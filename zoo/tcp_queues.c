// area: TCP
// shows: full send and receive queues of a connection: no byte lost or doubled
// foreign: yes
// options: --tcp-established
#include "zoo.h"
#include "tcp.h"

static unsigned char byte_at(size_t n)
{
	return (unsigned char)(n * 13 % 251);
}

int main(void)
{
	static unsigned char block[1 << 16];
	size_t sent[2] = { 0 };
	int ends[2];

	tcp_pair(AF_INET, &ends[0], &ends[1]);
	for (int i = 0; i < 2; i++) {
		int quiet = 0;

		/* Until nothing has fitted for a while. */
		while (quiet < 10) {
			for (size_t k = 0; k < sizeof block; k++)
				block[k] = byte_at(sent[i] + k);
			ssize_t n = send(ends[i], block, sizeof block, MSG_DONTWAIT);

			if (n < 0) {
				CHECK_EQ(errno, EAGAIN);
				zoo_sleep_ms(5);
				quiet++;
			} else {
				sent[i] += n;
				quiet = 0;
			}
		}
	}
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 2; i++)
		for (size_t at = 0; at < sent[i];) {
			ssize_t n = TRY(recv(ends[!i], block, sizeof block, 0));

			CHECK(n > 0);
			for (ssize_t k = 0; k < n; k++, at++)
				CHECK_EQ(block[k], byte_at(at));
		}
	CHECK(recv(ends[0], block, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN);
	tcp_talk(ends[0], ends[1]);
	zoo_pass();
}
