// area: TCP
// shows: connections, open and half closed, behind nftables rules that pass only what they have seen begin
// foreign: yes
// options: --tcp-established
// files: /usr/sbin/nft
// needs: /usr/sbin/nft
#include "firewall.h"
#include "tcp.h"

int main(void)
{
	int families[] = { AF_INET, AF_INET6 }, servers[4], clients[4];
	char text[16];

	firewall_nft();
	for (int i = 0; i < 4; i++)
		tcp_pair(families[i % 2], &servers[i], &clients[i]);
	tcp_talk(servers[0], clients[0]);
	for (int i = 2; i < 4; i++) {
		TRY(shutdown(clients[i], SHUT_WR));
		WAIT_UNTIL(tcp_state(clients[i]) == TCP_FIN_WAIT2 && tcp_state(servers[i]) == TCP_CLOSE_WAIT);
	}
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 2; i++) {
		tcp_talk(servers[i], clients[i]);
		tcp_talk(clients[i], servers[i]);
	}
	for (int i = 2; i < 4; i++) {
		CHECK_EQ(tcp_state(clients[i]), TCP_FIN_WAIT2);
		CHECK_EQ(recv(servers[i], text, 1, 0), 0);
		CHECK_EQ(send(servers[i], "answer", 6, 0), 6);
		TRY(close(servers[i]));
		CHECK_EQ(recv(clients[i], text, sizeof text, MSG_WAITALL), 6);
		CHECK(memcmp(text, "answer", 6) == 0);
	}
	firewall_nft_down();
	zoo_pass();
}
