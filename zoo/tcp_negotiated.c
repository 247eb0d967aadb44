// area: TCP
// shows: window scale, timestamps and MSS as negotiated are kept
// foreign: yes
// options: --tcp-established
#include "zoo.h"
#include "tcp.h"

int main(void)
{
	struct tcp_info before, after;
	socklen_t len = sizeof before;
	int server, client;

	tcp_pair(AF_INET, &server, &client);
	tcp_talk(server, client);
	TRY(getsockopt(client, IPPROTO_TCP, TCP_INFO, &before, &len));
	zoo_ready();
	zoo_wait();
	len = sizeof after;
	TRY(getsockopt(client, IPPROTO_TCP, TCP_INFO, &after, &len));
	CHECK_EQ(after.tcpi_state, TCP_ESTABLISHED);
	CHECK_EQ(after.tcpi_options, before.tcpi_options);
	CHECK_EQ(after.tcpi_snd_wscale, before.tcpi_snd_wscale);
	CHECK_EQ(after.tcpi_rcv_wscale, before.tcpi_rcv_wscale);
	CHECK_EQ(after.tcpi_snd_mss, before.tcpi_snd_mss);
	for (int i = 0; i < 100; i++)
		tcp_talk(server, client);
	zoo_pass();
}
