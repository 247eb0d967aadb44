// area: mounts
// shows: namespaces that are kept as files, as `ip netns` and Docker do: the task's own network, and the
//   network, UTS and IPC namespaces of a child, one of them read-only on a shared mount
// modes: pidns ns sealed userns
#include "zoo.h"
#include <sys/mount.h>

static void keep(const char *name, pid_t pid, const char *kind)
{
	char from[64];

	close(TRY(open(name, O_CREAT | O_RDONLY | O_CLOEXEC, 0444)));
	snprintf(from, sizeof from, "/proc/%d/ns/%s", pid, kind);
	TRY(mount(from, name, NULL, MS_BIND, NULL));
}

/* Whether the file is that namespace of the process. */
static bool is_kept(const char *name, pid_t pid, const char *kind)
{
	char path[64];
	struct stat file, namespace;

	snprintf(path, sizeof path, "/proc/%d/ns/%s", pid, kind);
	TRY(stat(name, &file));
	TRY(stat(path, &namespace));
	return file.st_dev == namespace.st_dev && file.st_ino == namespace.st_ino;
}

int main(void)
{
	char name[65] = "";
	pid_t child = TRY(fork());
	int fd;

	if (!child) {
		TRY(unshare(CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWIPC));
		TRY(sethostname("kept", 4));
		zoo_tell("apart");
		zoo_await("compared");
		_exit(3);
	}
	zoo_await("apart");
	TRY(mkdir("kept", 0755));
	TRY(mount("kept", "kept", NULL, MS_BIND, NULL));
	TRY(mount(NULL, "kept", NULL, MS_SHARED, NULL));
	keep("kept/default", getpid(), "net");
	keep("kept/net", child, "net");
	keep("kept/uts", child, "uts");
	keep("ipc", child, "ipc");
	TRY(mount(NULL, "kept/uts", NULL, MS_BIND | MS_REMOUNT | MS_RDONLY, NULL));
	zoo_ready();
	zoo_wait();
	CHECK(is_kept("kept/default", getpid(), "net"));
	CHECK(is_kept("kept/net", child, "net"));
	CHECK(is_kept("kept/uts", child, "uts"));
	CHECK(is_kept("ipc", child, "ipc"));
	CHECK(!is_kept("kept/net", getpid(), "net"));
	zoo_tell("compared");
	fd = TRY(open("kept/uts", O_RDONLY | O_CLOEXEC));
	CHECK_EXIT(child, 3);
	/* It stays although nobody lives in it any more. */
	TRY(setns(fd, CLONE_NEWUTS));
	TRY(close(fd));
	TRY(gethostname(name, sizeof name - 1));
	CHECK(strcmp(name, "kept") == 0);
	TRY(umount("kept/net"));
	TRY(umount("kept/uts"));
	zoo_pass();
}
