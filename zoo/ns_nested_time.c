// area: other namespaces
// shows: time namespaces inside of the tree, one made by a task that lives in another: their clocks and
//   timers go on from where they were, later children get into them, and who has made them stays outside
// modes: plain leave-running pidns ns userns
// foreign: no CRIU keeps one time namespace
#include "zoo.h"
#include <sys/timerfd.h>

#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x80
#endif

#define DAY 86400L

static const clockid_t clocks[] = { CLOCK_MONOTONIC, CLOCK_BOOTTIME };

static time_t shown(int clock)
{
	struct timespec now;

	TRY(clock_gettime(clocks[clock], &now));
	return now.tv_sec;
}

/* Children get into a new namespace, whose clocks are so many days ahead of the host's. */
static void make(long days)
{
	char text[80];
	int fd;

	if (unshare(CLONE_NEWTIME))
		zoo_skip("no time namespaces");
	snprintf(text, sizeof text, "monotonic %ld 5\nboottime %ld 0\n", days * DAY, 2 * days * DAY);
	fd = TRY(open("/proc/self/timens_offsets", O_WRONLY));
	CHECK_EQ(write(fd, text, strlen(text)), (ssize_t)strlen(text));
	TRY(close(fd));
}

/* Waits to be dumped; the clocks have gone on since "since", and a timer until a point of time. */
static void live(const char *name, const time_t since[2])
{
	struct itimerspec hour = { .it_value = { shown(0) + 3600, 0 } }, left;
	int fd = TRY(timerfd_create(CLOCK_MONOTONIC, 0));
	time_t before[2] = { shown(0), shown(1) };

	TRY(timerfd_settime(fd, TFD_TIMER_ABSTIME, &hour, NULL));
	zoo_tell(name);
	zoo_wait();
	for (int i = 0; i < 2; i++) {
		CHECK(shown(i) >= before[i] && shown(i) - before[i] < 600);
		CHECK(shown(i) >= since[i] && shown(i) - since[i] < 1200);
	}
	TRY(timerfd_gettime(fd, &left));
	CHECK(left.it_value.tv_sec <= 3600 && left.it_value.tv_sec > 3000);
	TRY(close(fd));
}

/* Makes a namespace, in which it does not live, and lives on with children there. */
static void lead(long days, void (*inside)(const time_t *))
{
	time_t old[2] = { shown(0), shown(1) }, new[2];
	char name[16];
	pid_t child;

	make(days);
	child = TRY(fork());
	if (!child) {
		for (int i = 0; i < 2; i++)
			new[i] = shown(i);
		CHECK(new[0] - old[0] >= 10 * DAY && new[1] - old[1] >= 20 * DAY);
		inside(new);
		_exit(3);
	}
	snprintf(name, sizeof name, "in-%ld", days);
	zoo_await(name);
	snprintf(name, sizeof name, "over-%ld", days);
	live(name, old);
	CHECK_EXIT(child, 3);
	child = TRY(fork());
	if (!child) {
		for (int i = 0; i < 2; i++)
			CHECK(shown(i) - old[i] >= 10 * DAY);
		_exit(4);
	}
	CHECK_EXIT(child, 4);
}

static void innermost(const time_t *since)
{
	live("in-25", since);
}

static void inner(const time_t *since)
{
	/* Neither its clocks are those of its parent, nor its children's its own. */
	zoo_tell("in-12");
	lead(25, innermost);
	for (int i = 0; i < 2; i++)
		CHECK(shown(i) >= since[i] && shown(i) - since[i] < 1200);
}

int main(void)
{
	pid_t child = TRY(fork());

	if (!child) {
		lead(12, inner);
		_exit(5);
	}
	zoo_await("over-12");
	zoo_await("over-25");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 5);
	zoo_pass();
}
