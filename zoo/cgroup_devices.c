// area: control groups
// shows: lists of devices of a group and of one inside (version 1): both are made anew, and nothing is allowed but their entries
// modes: plain leave-running
// options: --manage-cgroups
// needs: /sys/fs/cgroup/devices
// restore: --policy-rule foreign.cgroups.allow="all" --policy-rule foreign.files.devices="all" --action-script ../work/between
// foreign: yes
#include "cgroup.h"
#include <sys/sysmacros.h>

#define ROOT "/sys/fs/cgroup/devices"

static char group[128], inner[160];

/* The list of a group, or one entry more or less of it. */
static const char *in(const char *dir, const char *file)
{
	static char path[PATH_MAX];

	snprintf(path, sizeof path, "%s/%s", dir, file);
	return path;
}

static void change(const char *dir, const char *file, const char *entry)
{
	int fd = TRY(open(in(dir, file), O_WRONLY));

	CHECK_EQ(write(fd, entry, strlen(entry)), strlen(entry));
	TRY(close(fd));
}

static void check_list(const char *dir, const char *want)
{
	const char *got = zoo_slurp(in(dir, "devices.list"));

	if (strcmp(got, want))
		zoo_fail("%s allows %s", dir, got);
}

/* Whether the caller may open a device. */
static bool opens(const char *device, int how)
{
	int fd = open(device, how | O_NOCTTY | O_CLOEXEC);

	if (fd >= 0)
		TRY(close(fd));
	else
		CHECK_EQ(errno, EPERM);
	return fd >= 0;
}

static bool makes(unsigned minor)
{
	char name[32];
	int failed;

	snprintf(name, sizeof name, "device-%d-%u", getpid(), minor);
	failed = mknod(name, S_IFCHR | 0600, makedev(1, minor));
	if (!failed)
		TRY(unlink(name));
	else
		CHECK_EQ(errno, EPERM);
	return !failed;
}

static void check_group(void)
{
	check_list(group, "c 1:3 rwm\nc 1:5 r\nb 7:* rm\n");
	CHECK(opens("/dev/null", O_RDWR));
	CHECK(makes(3));
	CHECK(opens("/dev/zero", O_RDONLY));
	CHECK(!opens("/dev/zero", O_RDWR));
	CHECK(!makes(5));
	CHECK(!opens("/dev/full", O_RDONLY));
}

static void check_inner(void)
{
	check_list(inner, "c 1:3 rw\n");
	CHECK(opens("/dev/null", O_RDWR));
	CHECK(!makes(3));
	CHECK(!opens("/dev/zero", O_RDONLY));
}

/* Both groups go before the restore, where the tasks have left them. */
static void go_between(void)
{
	FILE *script = fopen("between", "w");

	CHECK(script);
	fprintf(script, "#!/bin/sh\n[ $CRTOOLS_SCRIPT_ACTION = pre-restore ] && [ -d %s ] || exit 0\nrmdir %s %s\n",
		group, inner, group);
	TRY(fchmod(fileno(script), 0755));
	CHECK(!fclose(script));
}

int main(void)
{
	struct stat st;
	pid_t child;

	/* Named after the working directory, which is this case's own. */
	TRY(stat(".", &st));
	snprintf(group, sizeof group, ROOT "/zoo-%lu", (unsigned long)st.st_ino);
	snprintf(inner, sizeof inner, "%s/inner", group);
	go_between();
	TRY(mkdir(group, 0755));
	change(group, "devices.deny", "a");
	change(group, "devices.allow", "c 1:3 rwm");
	change(group, "devices.allow", "c 1:5 r");
	change(group, "devices.allow", "b 7:* rm");
	/* It begins with what is allowed above. */
	TRY(mkdir(inner, 0755));
	change(inner, "devices.deny", "c 1:3 m");
	change(inner, "devices.deny", "c 1:5 r");
	change(inner, "devices.deny", "b 7:* rm");
	enter(group);
	check_group();
	child = TRY(fork());
	if (child == 0) {
		enter(inner);
		check_inner();
		zoo_tell("child");
		zoo_wait();
		check_inner();
		enter(ROOT);
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	check_group();
	CHECK_EXIT(child, 0);
	enter(ROOT);
	TRY(rmdir(inner));
	TRY(rmdir(group));
	zoo_pass();
}
