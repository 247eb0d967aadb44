// area: TCP
// shows: both sides have closed with data in both queues (CLOSING)
// foreign: yes
// options: --tcp-established
#include "zoo.h"
#include "tcp.h"

int main(void)
{
	static char block[65536];
	size_t sent[2] = { 0 };
	int ends[2];

	tcp_pair(AF_INET, &ends[0], &ends[1]);
	for (int i = 0; i < 2; i++)
		for (int quiet = 0; quiet < 10;) {
			ssize_t n = send(ends[i], block, sizeof block, MSG_DONTWAIT);

			if (n < 0) {
				zoo_sleep_ms(5);
				quiet++;
			} else
				sent[i] += n;
		}
	for (int i = 0; i < 2; i++)
		TRY(shutdown(ends[i], SHUT_WR));
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 2; i++) {
		size_t got = 0;
		ssize_t n;

		while ((n = recv(ends[!i], block, sizeof block, 0)) > 0)
			got += n;
		CHECK_EQ(n, 0);
		CHECK_EQ(got, sent[i]);
	}
	zoo_pass();
}
