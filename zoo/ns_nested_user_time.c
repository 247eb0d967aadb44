// area: other namespaces
// shows: time namespaces that belong to user namespaces inside of the tree: one whose maker stays outside of it, and one
//   whose maker has entered it
// modes: plain leave-running pidns ns userns
// foreign: no CRIU keeps one time namespace
#include "zoo.h"
#include <sys/stat.h>

#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x80
#endif

#define DAY 86400L

static time_t shown(void)
{
	struct timespec now;

	TRY(clock_gettime(CLOCK_MONOTONIC, &now));
	return now.tv_sec;
}

/* Makes a user namespace, and a time namespace in it for children, whose clocks are so many days ahead. */
static void make(long days)
{
	char text[80];
	int fd;

	if (unshare(CLONE_NEWUSER | CLONE_NEWTIME))
		zoo_skip("no time namespaces");
	snprintf(text, sizeof text, "monotonic %ld 0\nboottime %ld 0\n", days * DAY, days * DAY);
	fd = TRY(open("/proc/self/timens_offsets", O_WRONLY));
	CHECK_EQ(write(fd, text, strlen(text)), (ssize_t)strlen(text));
	TRY(close(fd));
}

/* Waits to be dumped. The clock, which showed "since" at first, has gone on. */
static void live(const char *name, time_t since)
{
	time_t before = shown();

	CHECK(before >= since && before - since < 600);
	zoo_tell(name);
	zoo_wait();
	CHECK(shown() >= before && shown() - before < 600);
}

static void outside(void)
{
	time_t old = shown();
	pid_t child;

	make(10);
	child = TRY(fork());
	if (!child) {
		live("child", old + 10 * DAY);
		_exit(5);
	}
	live("outside", old);
	CHECK_EXIT(child, 5);
	/* Its next child gets there as well. */
	child = TRY(fork());
	if (!child) {
		CHECK(shown() - old >= 10 * DAY);
		_exit(6);
	}
	CHECK_EXIT(child, 6);
	_exit(3);
}

static void inside(void)
{
	time_t old = shown();
	int fd;

	make(20);
	fd = TRY(open("/proc/self/ns/time_for_children", O_RDONLY));
	TRY(setns(fd, CLONE_NEWTIME));
	TRY(close(fd));
	live("inside", old + 20 * DAY);
	_exit(4);
}

int main(void)
{
	pid_t first, second;

	TRY(chmod(".", 0777));
	first = TRY(fork());
	if (!first)
		outside();
	second = TRY(fork());
	if (!second)
		inside();
	zoo_await("child");
	zoo_await("outside");
	zoo_await("inside");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(first, 3);
	CHECK_EXIT(second, 4);
	zoo_pass();
}
