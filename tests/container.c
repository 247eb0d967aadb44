/*
 * Starts a program of the zoo for the harness, as a session leader without terminal whose standard
 * streams are files of its own.
 *
 *   container PIDFILE WORKDIR PROGRAM                     as a daemon on the host
 *   container PIDFILE WORKDIR PROGRAM ROOT NAMESPACES     under an init in namespaces of its own
 *
 * NAMESPACES is a comma-separated list of pid, mnt, net, ipc, uts, cgroup, time and user; with it,
 * WORKDIR and PROGRAM are paths inside of ROOT, which holds this program as /bin/container. The id
 * of the first task (the program, or init) is written to PIDFILE once the program is about to start.
 */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x80
#endif
#define USER_ID "100000"

static const struct {
	const char *name;
	unsigned long flag;
} kinds[] = {
	{ "pid", CLONE_NEWPID }, { "mnt", CLONE_NEWNS },	 { "net", CLONE_NEWNET },
	{ "ipc", CLONE_NEWIPC }, { "uts", CLONE_NEWUTS },	 { "cgroup", CLONE_NEWCGROUP },
	{ "time", CLONE_NEWTIME }, { "user", CLONE_NEWUSER },
};

static unsigned long parse(char *list)
{
	unsigned long flags = 0;

	for (char *name = strtok(list, ","); name; name = strtok(NULL, ",")) {
		size_t i = 0;
		while (i < sizeof kinds / sizeof *kinds && strcmp(kinds[i].name, name))
			i++;
		if (i == sizeof kinds / sizeof *kinds)
			errx(1, "no such namespace: %s", name);
		flags |= kinds[i].flag;
	}
	return flags;
}

static void put(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);

	if (fd < 0 || write(fd, text, strlen(text)) < 0)
		err(1, "%s", path);
	close(fd);
}

static void put_pid(const char *path, pid_t pid)
{
	char text[16], tmp[4096];

	snprintf(text, sizeof text, "%d", pid);
	snprintf(tmp, sizeof tmp, "%s.tmp", path);
	put(tmp, text);
	if (rename(tmp, path))
		err(1, "%s", path);
}

static void do_mount(const char *type, const char *at, unsigned long flags, const char *data)
{
	if (mkdir(at, 0755) && access(at, F_OK))
		err(1, "mkdir %s", at);
	if (mount(type, at, type, flags, data))
		err(1, "mount %s", at);
}

/* The mounts of a container as runtimes make them, and the root moved to them. */
static void enter_root(const char *root, unsigned long flags)
{
	if (mount(NULL, "/", NULL, MS_PRIVATE | MS_REC, NULL) || mount(root, root, NULL, MS_BIND | MS_REC, NULL))
		err(1, "bind %s", root);
	if (chdir(root))
		err(1, "chdir %s", root);
	if (flags & CLONE_NEWPID)
		do_mount("proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
	if (flags & CLONE_NEWNET)
		do_mount("sysfs", "sys", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY, NULL);
	do_mount("devpts", "dev/pts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620");
	do_mount("tmpfs", "dev/shm", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=1777,size=67108864");
	do_mount("tmpfs", "tmp", MS_NOSUID | MS_NODEV, "mode=1777,size=268435456");
	if (flags & CLONE_NEWIPC)
		do_mount("mqueue", "dev/mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
	if (syscall(SYS_pivot_root, ".", ".") || umount2(".", MNT_DETACH) || chdir("/"))
		err(1, "pivot_root %s", root);
}

static void loopback_up(void)
{
	struct ifreq req = { .ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING };
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &req))
		err(1, "loopback");
	close(fd);
}

static void streams(const char *workdir)
{
	int in, out;

	if (chdir(workdir))
		err(1, "chdir %s", workdir);
	in = open("/dev/null", O_RDONLY);
	out = open("out", O_WRONLY | O_CREAT | O_APPEND, 0644);
	if (in < 0 || out < 0)
		err(1, "standard streams");
	dup2(in, 0);
	dup2(out, 1);
	dup2(out, 2);
	syscall(SYS_close_range, 3, ~0u, 0);
}

static void run(const char *program)
{
	umask(022);
	if (setsid() < 0)
		err(1, "setsid");
	execl(program, program, NULL);
	err(1, "exec %s", program);
}

/* Process 1 of the namespace: starts the program, reaps what it is left, and ends with the program. */
static void init(const char *workdir, const char *program)
{
	pid_t child, pid;

	setsid();
	streams(workdir);
	/* Before there is a program: what it is seen to be must not change once that is ready. */
	prctl(PR_SET_NAME, "zoo-init");
	child = fork();
	if (child < 0)
		err(1, "fork");
	if (child == 0)
		run(program);
	do
		pid = waitpid(-1, NULL, 0);
	while (pid != child);
	_exit(0);
}

static int contain(char **argv, unsigned long flags)
{
	struct clone_args {
		unsigned long long flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size,
			tls, set_tid, set_tid_size, cgroup;
	} args = { .flags = flags & ~CLONE_NEWTIME, .exit_signal = SIGCHLD };
	int go[2];
	char byte;
	pid_t pid;

	if ((flags & CLONE_NEWTIME) && unshare(CLONE_NEWTIME))
		err(1, "unshare time");
	if (flags & CLONE_NEWTIME)
		put("/proc/self/timens_offsets", "monotonic 86400 0\nboottime 172800 0\n");
	if (pipe2(go, O_CLOEXEC))
		err(1, "pipe");
	pid = (pid_t)syscall(SYS_clone3, &args, sizeof args);
	if (pid < 0)
		err(1, "clone3");
	if (pid == 0) {
		if (read(go[0], &byte, 1) != 1)
			_exit(1);
		if ((flags & CLONE_NEWUSER) && (setresgid(0, 0, 0) || setresuid(0, 0, 0)))
			err(1, "setresuid");
		if (flags & CLONE_NEWUTS && (sethostname("zoo", 3) || setdomainname("animals", 7)))
			err(1, "sethostname");
		if (flags & CLONE_NEWNET)
			loopback_up();
		enter_root(argv[4], flags);
		/* Its program, too, must be a file of the container. */
		execl("/bin/container", "container", "--init", argv[2], argv[3], NULL);
		err(1, "exec /bin/container");
	}
	if (flags & CLONE_NEWUSER) {
		char path[64];

		snprintf(path, sizeof path, "/proc/%d/uid_map", pid);
		put(path, "0 " USER_ID " 65536\n");
		snprintf(path, sizeof path, "/proc/%d/gid_map", pid);
		put(path, "0 " USER_ID " 65536\n");
	}
	put_pid(argv[1], pid);
	return write(go[1], "g", 1) != 1;
}

int main(int argc, char **argv)
{
	pid_t launcher = getpid(), pid;

	if (argc == 4 && !strcmp(argv[1], "--init"))
		init(argv[2], argv[3]);
	if (argc == 6)
		return contain(argv, parse(argv[5]));
	if (argc != 4)
		errx(1, "usage: container PIDFILE WORKDIR PROGRAM [ROOT NAMESPACES]");
	pid = fork();
	if (pid < 0)
		err(1, "fork");
	if (pid == 0) {
		/* A program may look at its parent first of all: it is not to see it change. */
		while (getppid() == launcher)
			usleep(1000);
		put_pid(argv[1], getpid());
		streams(argv[2]);
		run(argv[3]);
	}
	return 0;
}
