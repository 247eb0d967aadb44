// area: refusals
// shows: a process that dumps core
// expect: refused "dumping core"
#include "zoo.h"
#include <sys/resource.h>

#define LEN (512ul << 30)

/* A core file of this process takes a while: the kernel looks for each page of an empty mapping. */
static void crash(void)
{
	char *mapping;

	struct rlimit all = {RLIM_INFINITY, RLIM_INFINITY};

	TRY(setrlimit(RLIMIT_CORE, &all));
	mapping = zoo_map(LEN, PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
	mapping[0] = 1;
	abort();
}

static bool dumps_core(pid_t pid)
{
	char status[64];

	snprintf(status, sizeof status, "/proc/%d/status", pid);
	return strstr(zoo_slurp(status), "CoreDumping:\t1");
}

int main(void)
{
	const char *pattern = "/proc/sys/kernel/core_pattern";
	pid_t child;

	if (access(pattern, R_OK) || zoo_slurp(pattern)[0] != 'c')
		zoo_skip("core files go elsewhere");
	child = TRY(fork());
	if (child == 0)
		crash();
	WAIT_UNTIL(dumps_core(child));
	zoo_ready();
	zoo_wait();
	TRY(kill(child, SIGKILL));
	CHECK(zoo_reap(child) != 0);
	zoo_pass();
}
