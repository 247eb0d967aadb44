// area: TCP
// shows: LAST_ACK whose last acknowledgement is lost, with nothing left to be sent
// foreign: yes
// options: --tcp-established
#include "zoo.h"
#include "tcp.h"
#include <linux/filter.h>

/* From here on nothing reaches the socket. */
static void tcp_deaf(int fd)
{
	struct sock_filter nothing = BPF_STMT(BPF_RET | BPF_K, 0);
	struct sock_fprog program = { .len = 1, .filter = &nothing };

	TRY(setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program));
}

int main(void)
{
	int families[] = { AF_INET, AF_INET6 }, last[2], peer[2];
	char text[8];

	signal(SIGPIPE, SIG_IGN);
	for (int i = 0; i < 2; i++) {
		tcp_pair(families[i], &last[i], &peer[i]);
		tcp_talk(last[i], peer[i]);
		CHECK_EQ(send(peer[i], "unread", 6, 0), 6);
		TRY(shutdown(peer[i], SHUT_WR));
		WAIT_UNTIL(tcp_state(last[i]) == TCP_CLOSE_WAIT);
		WAIT_UNTIL(tcp_state(peer[i]) == TCP_FIN_WAIT2);
		tcp_deaf(peer[i]);
		TRY(shutdown(last[i], SHUT_WR));
		CHECK_EQ(tcp_state(last[i]), TCP_LAST_ACK);
	}
	/* One has read everything, the end, too. */
	CHECK_EQ(recv(last[1], text, sizeof text, MSG_WAITALL), 6);
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 2; i++) {
		CHECK_EQ(tcp_state(last[i]), TCP_LAST_ACK);
		CHECK_EQ(tcp_state(peer[i]), TCP_FIN_WAIT2);
		sock_set(peer[i], SOL_SOCKET, SO_DETACH_FILTER, 0);
		CHECK_EQ(recv(last[i], text, sizeof text, MSG_WAITALL), i ? 0 : 6);
		CHECK_EQ(recv(peer[i], text, sizeof text, 0), 0);
		WAIT_UNTIL(tcp_state(last[i]) == TCP_CLOSE);
		CHECK(send(last[i], "x", 1, 0) < 0 && errno == EPIPE);
	}
	zoo_pass();
}
