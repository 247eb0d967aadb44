// area: event descriptors
// shows: a signalfd: its mask and a pending signal; no signal out of nothing
// foreign: yes
#include "zoo.h"
#include <sys/signalfd.h>

int main(void)
{
	struct signalfd_siginfo info;
	sigset_t set;
	int fd, other;

	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	sigaddset(&set, SIGRTMIN + 4);
	TRY(sigprocmask(SIG_BLOCK, &set, NULL));
	fd = TRY(signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC));
	sigemptyset(&set);
	sigaddset(&set, SIGUSR2);
	TRY(sigprocmask(SIG_BLOCK, &set, NULL));
	other = TRY(signalfd(-1, &set, SFD_NONBLOCK));
	TRY(sigqueue(getpid(), SIGRTMIN + 4, (union sigval){ .sival_int = 1234 }));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(read(fd, &info, sizeof info), sizeof info);
	CHECK_EQ(info.ssi_signo, SIGRTMIN + 4);
	CHECK_EQ(info.ssi_int, 1234);
	CHECK(read(fd, &info, sizeof info) < 0 && errno == EAGAIN);
	CHECK(read(other, &info, sizeof info) < 0 && errno == EAGAIN);
	TRY(kill(getpid(), SIGUSR1));
	CHECK(read(other, &info, sizeof info) < 0 && errno == EAGAIN);
	CHECK_EQ(read(fd, &info, sizeof info), sizeof info);
	CHECK_EQ(info.ssi_signo, SIGUSR1);
	CHECK_EQ(fcntl(fd, F_GETFD), FD_CLOEXEC);
	zoo_pass();
}
