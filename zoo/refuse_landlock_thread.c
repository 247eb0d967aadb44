// area: refusals
// shows: a thread that Landlock confines, in a process that is not, is refused; so are rules that are about signals only
// expect: refused "Landlock domain (1 of 16 layers)"
// build: -pthread
#include "landlock.h"
#include <pthread.h>

static void *confined(void *unused)
{
	struct { uint64_t fs, net, scoped; } attr = { .scoped = 2 /* LANDLOCK_SCOPE_SIGNAL */ };
	int fd = (int)syscall(SYS_landlock_create_ruleset, &attr, sizeof attr, 0);

	/* Before Linux 6.12 rules are about files or ports. */
	if (fd < 0)
		confine();
	else
		restrict_by(fd);
	zoo_ready();
	zoo_wait();
	return unused;
}

int main(void)
{
	pthread_t thread;

	CHECK(!pthread_create(&thread, NULL, confined, NULL));
	CHECK(!pthread_join(thread, NULL));
	/* It is free, and nobody has changed that. */
	TRY(mkdir("directory", 0700));
	CHECK_EQ(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0), 0);
	zoo_pass();
}
