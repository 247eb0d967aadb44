/* clock FILE: counts into FILE as long as the vDSO and the kernel say the same of the time. */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL

static const clockid_t clocks[] = { CLOCK_REALTIME, CLOCK_MONOTONIC, CLOCK_BOOTTIME, CLOCK_MONOTONIC_COARSE };

static long long nanoseconds(struct timespec t)
{
	return t.tv_sec * SECOND + t.tv_nsec;
}

static int agree(long long a, long long b)
{
	return llabs(a - b) < SECOND;
}

static int right(void)
{
	struct timespec vdso, kernel;
	struct timeval day;
	unsigned i;

	for (i = 0; i < sizeof(clocks) / sizeof(*clocks); i++) {
		if (clock_gettime(clocks[i], &vdso) || syscall(SYS_clock_gettime, clocks[i], &kernel))
			return 0;
		if (!agree(nanoseconds(vdso), nanoseconds(kernel)))
			return 0;
	}
	syscall(SYS_clock_gettime, CLOCK_REALTIME, &kernel);
	if (gettimeofday(&day, NULL) || !agree(day.tv_sec * SECOND, kernel.tv_sec * SECOND))
		return 0;
	return labs(time(NULL) - kernel.tv_sec) < 2;
}

/* No function of libc that looks for the best instructions: the next processor may not have them. */
static void line(int fd, unsigned n)
{
	char text[12], *at = text + sizeof(text);

	*--at = '\n';
	do
		*--at = '0' + n % 10;
	while (n /= 10);
	if (write(fd, at, text + sizeof(text) - at) < 0)
		_exit(1);
}

int main(int argc, char **argv)
{
	struct timespec nap = { 0, SECOND / 50 };
	int fd = argc > 1 ? open(argv[1], O_WRONLY | O_CREAT | O_APPEND, 0644) : -1;
	unsigned n;

	for (n = 1; fd >= 0 && right(); n++) {
		line(fd, n);
		syscall(SYS_nanosleep, &nap, NULL);
	}
	return 1;
}
