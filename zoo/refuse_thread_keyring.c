// area: refusals
// shows: a keyring that only a second thread has is refused with --strict
// dump: --strict
// expect: refused "its thread's own keyring"
// build: -pthread
#include "zoo.h"
#include <linux/keyctl.h>
#include <pthread.h>

/* A task that starts a thread has all signals blocked until that has returned. */
static pthread_barrier_t started;

static void *with_key(void *unused)
{
	pthread_barrier_wait(&started);
	TRY(syscall(SYS_add_key, "user", "own", "content", 7ul, KEY_SPEC_THREAD_KEYRING));
	zoo_ready();
	zoo_wait();
	TRY(syscall(SYS_keyctl, KEYCTL_SEARCH, KEY_SPEC_THREAD_KEYRING, "user", "own", 0));
	return unused;
}

int main(void)
{
	pthread_t thread;

	if (syscall(SYS_keyctl, KEYCTL_GET_KEYRING_ID, KEY_SPEC_THREAD_KEYRING, 0) >= 0 || errno == ENOSYS)
		zoo_skip("no keyrings");
	CHECK(!pthread_barrier_init(&started, NULL, 2));
	CHECK(!pthread_create(&thread, NULL, with_key, NULL));
	pthread_barrier_wait(&started);
	CHECK(!pthread_join(thread, NULL));
	zoo_pass();
}
