// userfaultfd(2) by its ioctls.
#include "zoo.h"
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sys/ioctl.h>

/* Of newer kernels than the headers. */
#ifndef UFFD_FEATURE_WP_UNPOPULATED
#define UFFD_FEATURE_WP_UNPOPULATED (1 << 13)
#endif
#define FAULTS_OF_PROGRAM 1 /* UFFD_USER_MODE_ONLY */
#define POISON _IOWR(UFFDIO, 8, unsigned long long[4]) /* UFFDIO_POISON, Linux 6.6 */

/* One that tells of all faults, or, without the right to that, of those of the program. */
static inline int uffd_open(unsigned flags, unsigned long long features)
{
	struct uffdio_api api = { .api = UFFD_API, .features = features };
	int fd = (int)syscall(SYS_userfaultfd, flags);

	if (fd < 0)
		fd = (int)syscall(SYS_userfaultfd, flags | FAULTS_OF_PROGRAM);
	if (fd < 0)
		zoo_skip("no userfaultfd");
	if (ioctl(fd, UFFDIO_API, &api))
		zoo_skip("userfaultfd without such features");
	return fd;
}

static inline void uffd_register(int fd, const void *at, size_t len, unsigned long long mode)
{
	struct uffdio_register reg = { { (uintptr_t)at, len }, mode, 0 };

	TRY(ioctl(fd, UFFDIO_REGISTER, &reg));
}

static inline void uffd_protect(int fd, const void *at, size_t len, bool protect)
{
	struct uffdio_writeprotect wp = { { (uintptr_t)at, len }, protect ? UFFDIO_WRITEPROTECT_MODE_WP : 0 };

	TRY(ioctl(fd, UFFDIO_WRITEPROTECT, &wp));
}

static inline void uffd_zero(int fd, const void *at, size_t len)
{
	struct uffdio_zeropage zero = { { (uintptr_t)at, len }, 0, 0 };

	TRY(ioctl(fd, UFFDIO_ZEROPAGE, &zero));
}

/* Brings in a page that begins with a letter; one that is there already may be. */
static inline void uffd_fill(int fd, const void *at, char letter)
{
	static __thread char page[4096] __attribute__((aligned(4096)));
	struct uffdio_copy copy = { (uintptr_t)at, (uintptr_t)page, 4096, 0, 0 };

	page[0] = letter;
	if (ioctl(fd, UFFDIO_COPY, &copy))
		CHECK_EQ(errno, EEXIST);
}

/* The next event must be a fault at a page; its flags. */
static inline unsigned long long uffd_expect(int fd, const void *at)
{
	struct uffd_msg msg;
	ssize_t len;

	while ((len = read(fd, &msg, sizeof msg)) < 0 && (errno == EAGAIN || errno == EINTR))
		zoo_sleep_ms(1);
	CHECK_EQ(len, sizeof msg);
	CHECK_EQ(msg.event, UFFD_EVENT_PAGEFAULT);
	CHECK_EQ(msg.arg.pagefault.address & ~4095ul, (uintptr_t)at);
	return msg.arg.pagefault.flags;
}

/* A thread that touches memory that may be missing or protected. */
static inline void *uffd_reader(void *at)
{
	return (void *)(long)*(volatile char *)at;
}

static inline void *uffd_writer(void *at)
{
	*(volatile char *)at = 'w';
	return NULL;
}

static inline pthread_t uffd_start(void *(*work)(void *), void *at)
{
	pthread_t thread;

	CHECK(!pthread_create(&thread, NULL, work, at));
	return thread;
}

static inline long uffd_join(pthread_t thread)
{
	void *value;

	CHECK(!pthread_join(thread, &value));
	return (long)value;
}

/* The two letters of a flag that smaps shows of the mapping at an address. */
static inline bool uffd_flagged(const void *at, const char *flag)
{
	FILE *maps = fopen("/proc/self/smaps", "r");
	char line[4096];
	bool here = false, found = false;
	unsigned long start, end;

	CHECK(maps);
	while (fgets(line, sizeof line, maps))
		if (sscanf(line, "%lx-%lx ", &start, &end) == 2)
			here = start <= (uintptr_t)at && (uintptr_t)at < end;
		else if (here && !strncmp(line, "VmFlags:", 8))
			found = strstr(line, flag) != NULL;
	fclose(maps);
	return found;
}
