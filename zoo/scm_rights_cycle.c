// area: descriptors in flight
// shows: sockets that are queued in each other and in themselves
// foreign: yes
#include "zoo.h"
#include "scm.h"

int main(void)
{
	int a[2], b[2], fds[3];

	TRY(socketpair(AF_UNIX, SOCK_DGRAM, 0, a));
	TRY(socketpair(AF_UNIX, SOCK_DGRAM, 0, b));
	send_fd(a[1], a[0]);
	send_fd(a[1], b[0]);
	send_fd(b[1], a[0]);
	zoo_ready();
	zoo_wait();
	fds[0] = recv_fd(a[0]);
	fds[1] = recv_fd(a[0]);
	fds[2] = recv_fd(b[0]);
	CHECK_EQ(syscall(SYS_kcmp, getpid(), getpid(), 0, fds[0], a[0]), 0);
	CHECK_EQ(syscall(SYS_kcmp, getpid(), getpid(), 0, fds[1], b[0]), 0);
	CHECK_EQ(syscall(SYS_kcmp, getpid(), getpid(), 0, fds[2], a[0]), 0);
	zoo_pass();
}
