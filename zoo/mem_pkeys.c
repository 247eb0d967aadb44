// area: memory
// shows: protection keys: those of mappings, those that are allocated, of which one was given back, and what each
//   thread may do with them; a child has its parent's
// build: -pthread
// foreign: no CRIU's images do not have protection keys
#include "zoo.h"
#include <pthread.h>
#include <setjmp.h>

#define SIZE 16384

static sigjmp_buf before;
static volatile int code, key;
static char *plain, *readable, *hidden;
static int freed, of_readable, of_hidden;
static pthread_barrier_t barrier;

static void fault(int number, siginfo_t *info, void *context)
{
	(void)number;
	(void)context;
	code = info->si_code;
	key = info->si_pkey;
	siglongjmp(before, 1);
}

/* A handler of signals has the rights that new threads have, and leaves them behind when it jumps out. */
static uint32_t rights(void)
{
	uint32_t eax, edx;

	__asm__ volatile("rdpkru" : "=a"(eax), "=d"(edx) : "c"(0));
	return eax;
}

static void set_rights(uint32_t rights)
{
	__asm__ volatile("wrpkru" ::"a"(rights), "c"(0), "d"(0) : "memory");
}

/* The key that keeps this thread from an access; 0 if it is allowed. */
static int denied(char *place, bool write)
{
	uint32_t mine = rights();

	code = key = 0;
	if (sigsetjmp(before, 1) == 0) {
		if (write)
			*(volatile char *)place = 'w';
		else
			(void)*(volatile char *)place;
		return 0;
	}
	set_rights(mine);
	CHECK_EQ(code, SEGV_PKUERR);
	return key;
}

static int key_of(void *place)
{
	unsigned long start, end;
	FILE *smaps = fopen("/proc/self/smaps", "r");
	char line[512];
	int found = -1, value;
	bool within = false;

	CHECK(smaps);
	while (fgets(line, sizeof line, smaps)) {
		if (sscanf(line, "%lx-%lx ", &start, &end) == 2)
			within = start <= (unsigned long)place && (unsigned long)place < end;
		else if (within && sscanf(line, "ProtectionKey: %d", &value) == 1)
			found = value;
	}
	fclose(smaps);
	return found;
}

static void check_main(void)
{
	CHECK(zoo_filled(plain, SIZE, 1) && zoo_filled(readable, SIZE, 2));
	CHECK_EQ(pkey_get(of_readable), PKEY_DISABLE_WRITE);
	CHECK_EQ(pkey_get(of_hidden), PKEY_DISABLE_ACCESS);
	CHECK_EQ(denied(readable, false), 0);
	CHECK_EQ(denied(readable, true), of_readable);
	CHECK_EQ(denied(hidden, false), of_hidden);
	CHECK_EQ(denied(plain, true), 0);
}

static void *other(void *unused)
{
	(void)unused;
	TRY(pkey_set(of_hidden, 0));
	TRY(pkey_set(of_readable, PKEY_DISABLE_ACCESS));
	pthread_barrier_wait(&barrier);
	pthread_barrier_wait(&barrier);
	CHECK_EQ(pkey_get(of_hidden), 0);
	CHECK(zoo_filled(hidden, SIZE, 3));
	CHECK_EQ(denied(hidden, true), 0);
	CHECK_EQ(denied(readable, false), of_readable);
	return NULL;
}

int main(void)
{
	struct sigaction action = { .sa_sigaction = fault, .sa_flags = SA_SIGINFO };
	pthread_t thread;
	pid_t child;

	freed = pkey_alloc(0, 0);
	if (freed < 0)
		zoo_skip("this machine has no protection keys");
	TRY(sigaction(SIGSEGV, &action, NULL));
	plain = zoo_map(SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	readable = zoo_map(SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	hidden = zoo_map(SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1);
	zoo_fill(plain, SIZE, 1);
	zoo_fill(readable, SIZE, 2);
	zoo_fill(hidden, SIZE, 3);
	of_readable = TRY(pkey_alloc(0, PKEY_DISABLE_WRITE));
	of_hidden = TRY(pkey_alloc(0, PKEY_DISABLE_ACCESS));
	TRY(pkey_mprotect(readable, SIZE, PROT_READ | PROT_WRITE, of_readable));
	TRY(pkey_mprotect(hidden, SIZE, PROT_READ | PROT_WRITE, of_hidden));
	TRY(pkey_free(freed));
	CHECK(!pthread_barrier_init(&barrier, NULL, 2));
	CHECK(!pthread_create(&thread, NULL, other, NULL));
	pthread_barrier_wait(&barrier);
	child = TRY(fork());
	if (child == 0) {
		zoo_wait();
		check_main();
		CHECK_EQ(key_of(hidden), of_hidden);
		_exit(0);
	}
	zoo_ready();
	zoo_wait();
	check_main();
	CHECK_EQ(key_of(plain), 0);
	CHECK_EQ(key_of(readable), of_readable);
	CHECK_EQ(key_of(hidden), of_hidden);
	pthread_barrier_wait(&barrier);
	CHECK(!pthread_join(thread, NULL));
	/* The one that was given back is the next. */
	CHECK_EQ(pkey_alloc(0, 0), freed);
	CHECK_EQ(pkey_alloc(0, 0), of_hidden + 1);
	CHECK_EXIT(child, 0);
	zoo_pass();
}
