// area: other namespaces
// shows: settings of a pid namespace that are not kept are warned of
// modes: pidns ns
// warns: what its pid namespace is set to by sysctl (vm.memfd_noexec
#include "zoo.h"
#include <sys/utsname.h>

static void set(const char *name, const char *value)
{
	int fd = TRY(open(name, O_WRONLY | O_CLOEXEC));

	CHECK_EQ(write(fd, value, strlen(value)), (ssize_t)strlen(value));
	TRY(close(fd));
}

int main(void)
{
	struct utsname kernel;
	int major, minor;

	if (access("/proc/sys/vm/memfd_noexec", W_OK))
		zoo_skip("no settings of pid namespaces");
	set("/proc/sys/vm/memfd_noexec", "1");
	TRY(uname(&kernel));
	CHECK_EQ(sscanf(kernel.release, "%d.%d", &major, &minor), 2);
	/* Before that it is the machine's. */
	if (major > 6 || (major == 6 && minor >= 14))
		set("/proc/sys/kernel/pid_max", "30000");
	zoo_ready();
	zoo_wait();
	zoo_pass();
}
