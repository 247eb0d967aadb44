// area: signals
// shows: alternate stacks: registered in one thread, and in use by another at the moment of the dump
// foreign: yes
#include "zoo.h"
#include <pthread.h>

static char stacks[2][65536];

static void on_usr1(int sig)
{
	stack_t now;
	char here;

	(void)sig;
	zoo_tell("on-stack");
	zoo_wait();
	CHECK(&here > stacks[1] && &here < stacks[1] + sizeof stacks[1]);
	TRY(sigaltstack(NULL, &now));
	CHECK_EQ(now.ss_flags & SS_ONSTACK, SS_ONSTACK);
	CHECK(now.ss_sp == stacks[1]);
}

static void *work(void *arg)
{
	stack_t stack = { .ss_sp = stacks[1], .ss_size = sizeof stacks[1] };
	stack_t now;

	TRY(sigaltstack(&stack, NULL));
	TRY(syscall(SYS_tgkill, getpid(), syscall(SYS_gettid), SIGUSR1));
	TRY(sigaltstack(NULL, &now));
	CHECK_EQ(now.ss_flags, 0);
	return arg;
}

int main(void)
{
	stack_t stack = { .ss_sp = stacks[0], .ss_size = sizeof stacks[0] }, now;
	struct sigaction sa = { .sa_handler = on_usr1, .sa_flags = SA_ONSTACK };
	pthread_t thread;

	TRY(sigaltstack(&stack, NULL));
	TRY(sigaction(SIGUSR1, &sa, NULL));
	CHECK(pthread_create(&thread, NULL, work, NULL) == 0);
	zoo_await("on-stack");
	zoo_ready();
	zoo_wait();
	CHECK(pthread_join(thread, NULL) == 0);
	TRY(sigaltstack(NULL, &now));
	CHECK(now.ss_sp == stacks[0]);
	CHECK_EQ(now.ss_size, sizeof stacks[0]);
	CHECK_EQ(now.ss_flags, 0);
	zoo_pass();
}
