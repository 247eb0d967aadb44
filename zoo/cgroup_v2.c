// area: control groups
// shows: a group of the unified hierarchy
// modes: plain leave-running
// options: --manage-cgroups
// needs: /sys/fs/cgroup/unified
// restore: --policy-rule foreign.cgroups.allow="all"
// foreign: yes
#include "cgroup.h"

int main(void)
{
	char group[128], want[128];
	struct stat st;

	TRY(stat(".", &st));
	snprintf(group, sizeof group, "/sys/fs/cgroup/unified/zoo-%lu", (unsigned long)st.st_ino);
	snprintf(want, sizeof want, "0::/zoo-%lu\n", (unsigned long)st.st_ino);
	TRY(mkdir(group, 0755));
	enter(group);
	zoo_ready();
	zoo_wait();
	CHECK(strstr(zoo_slurp("/proc/self/cgroup"), want));
	enter("/sys/fs/cgroup/unified");
	TRY(rmdir(group));
	zoo_pass();
}
