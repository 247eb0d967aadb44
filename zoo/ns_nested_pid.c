// area: process tree
// shows: a pid namespace inside of the tree: numbers in it, orphans, groups, sessions, signals, timers,
//   owners of files, a zombie, and threads
// build: -pthread
// foreign: no CRIU keeps no pid namespaces within the tree
#include "zoo.h"
#include <poll.h>
#include <pthread.h>

/* What a task knows of itself. */
struct self {
	pid_t pid, ppid, pgrp, sid;
};

static struct self self(void)
{
	return (struct self){ getpid(), getppid(), getpgrp(), getsid(0) };
}

static void stay(const char *name)
{
	struct self old = self(), now;

	zoo_tell(name);
	zoo_wait();
	now = self();
	CHECK_EQ(now.pid, old.pid);
	CHECK_EQ(now.ppid, old.ppid);
	CHECK_EQ(now.pgrp, old.pgrp);
	CHECK_EQ(now.sid, old.sid);
}

static volatile sig_atomic_t hits, expired, ready;

static void hit(int signal, siginfo_t *info, void *context)
{
	(void)signal, (void)context;
	CHECK_EQ(info->si_pid, 1);
	hits++;
}

static void expire(int signal)
{
	(void)signal;
	expired = gettid();
}

static void leads_session(void)
{
	TRY(setsid());
	stay("session");
	_exit(3);
}

static void *thread(void *fd)
{
	struct f_owner_ex owner;
	pid_t tid = gettid();

	TRY(fcntl(*(int *)fd, F_SETOWN_EX, &(struct f_owner_ex){ F_OWNER_TID, tid }));
	ready = tid;
	zoo_wait();
	CHECK_EQ(gettid(), tid);
	TRY(fcntl(*(int *)fd, F_GETOWN_EX, &owner));
	CHECK_EQ(owner.type, F_OWNER_TID);
	CHECK_EQ(owner.pid, tid);
	return (void *)(intptr_t)tid;
}

static void leads_group(void)
{
	struct sigevent event = { .sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGRTMIN };
	struct sigaction action = { .sa_sigaction = hit, .sa_flags = SA_SIGINFO };
	struct itimerspec later = { .it_value.tv_sec = 1000 }, soon = { .it_value.tv_nsec = 1000 };
	pthread_t other;
	timer_t timer;
	void *tid;
	int fds[2];

	TRY(setpgid(0, 0));
	TRY(pipe(fds));
	TRY(fcntl(fds[0], F_SETOWN, getpid()));
	TRY(sigaction(SIGUSR1, &action, NULL));
	CHECK(signal(SIGRTMIN, expire) != SIG_ERR);
	event._sigev_un._tid = gettid();
	TRY(timer_create(CLOCK_MONOTONIC, &event, &timer));
	TRY(timer_settime(timer, 0, &later, NULL));
	CHECK_EQ(pthread_create(&other, NULL, thread, &fds[1]), 0);
	WAIT_UNTIL(ready);
	stay("group");
	CHECK_EQ(fcntl(fds[0], F_GETOWN), getpid());
	CHECK_EQ(pthread_join(other, &tid), 0);
	CHECK_EQ((intptr_t)tid, ready);
	TRY(timer_settime(timer, 0, &soon, NULL));
	WAIT_UNTIL(expired == getpid());
	WAIT_UNTIL(hits);
	_exit(4);
}

/* Its parent, which may have led its group, ends. */
static void orphan(const char *name, bool group)
{
	pid_t parent = TRY(fork());

	if (parent) {
		CHECK_EXIT(parent, 0);
		zoo_await(name);
		return;
	}
	if (group)
		TRY(setpgid(0, 0));
	parent = getpid();
	if (TRY(fork()) == 0) {
		WAIT_UNTIL(getppid() != parent);
		CHECK_EQ(getppid(), 1);
		stay(name);
		_exit(5);
	}
	_exit(0);
}

static int inner(void *arg)
{
	pid_t session, group, zombie, found;
	int pidfd, status, others = 0;
	siginfo_t info;

	(void)arg;
	CHECK_EQ(getpid(), 1);
	CHECK_EQ(getppid(), 0);
	session = TRY(fork());
	if (session == 0)
		leads_session();
	group = TRY(fork());
	if (group == 0)
		leads_group();
	CHECK_EQ(session, 2);
	CHECK_EQ(group, 3);
	zoo_await("session");
	zoo_await("group");
	orphan("orphan", false);
	orphan("orphan-in-group", true);
	zombie = TRY(fork());
	if (zombie == 0)
		_exit(7);
	TRY(waitid(P_PID, zombie, &info, WEXITED | WNOWAIT));
	pidfd = TRY(syscall(SYS_pidfd_open, session, 0));
	stay("inner");

	TRY(waitid(P_PIDFD, pidfd, &info, WEXITED));
	CHECK_EQ(info.si_pid, session);
	CHECK_EQ(info.si_status, 3);
	TRY(kill(group, SIGUSR1));
	CHECK_EXIT(group, 4);
	CHECK_EXIT(zombie, 7);
	while ((found = wait(&status)) > 0) {
		CHECK_EQ(WEXITSTATUS(status), 5);
		others++;
	}
	CHECK_EQ(others, 2);
	found = TRY(fork());
	if (found == 0)
		_exit(getppid() == 1 ? 8 : 0);
	CHECK_EXIT(found, 8);
	return 9;
}

int main(void)
{
	static char stack[65536] __attribute__((aligned(16)));
	pid_t child = TRY(clone(inner, stack + sizeof stack, CLONE_NEWPID | SIGCHLD, NULL));
	pid_t other = TRY(fork());

	if (other == 0) {
		stay("outer");
		_exit(6);
	}
	zoo_await("outer");
	zoo_await("inner");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 9);
	CHECK_EXIT(other, 6);
	zoo_pass();
}
