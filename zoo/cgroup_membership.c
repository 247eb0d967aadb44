// area: control groups
// shows: a process and its child in control groups of their own, with their mode, are put back there
// modes: plain leave-running
// options: --manage-cgroups
// needs: /sys/fs/cgroup/freezer
// restore: --policy-rule foreign.cgroups.allow="all"
// foreign: yes
#include "cgroup.h"

static bool within(const char *text)
{
	char want[PATH_MAX];

	snprintf(want, sizeof want, ":freezer:%s\n", text + strlen("/sys/fs/cgroup/freezer"));
	return strstr(zoo_slurp("/proc/self/cgroup"), want);
}

int main(void)
{
	char group[128], inner[160];
	struct stat st;
	pid_t child;

	/* Named after the working directory, which is this case's own. */
	TRY(stat(".", &st));
	snprintf(group, sizeof group, "/sys/fs/cgroup/freezer/zoo-%lu", (unsigned long)st.st_ino);
	snprintf(inner, sizeof inner, "%s/inner", group);
	TRY(mkdir(group, 0751));
	TRY(mkdir(inner, 0755));
	enter(group);
	child = TRY(fork());
	if (child == 0) {
		enter(inner);
		zoo_tell("child");
		zoo_wait();
		CHECK(within(inner));
		enter("/sys/fs/cgroup/freezer");
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK(within(group));
	CHECK_EXIT(child, 0);
	TRY(stat(group, &st));
	CHECK_EQ(st.st_mode & 0777, 0751);
	enter("/sys/fs/cgroup/freezer");
	TRY(rmdir(inner));
	TRY(rmdir(group));
	zoo_pass();
}
