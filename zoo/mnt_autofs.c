// area: mounts
// shows: automatic mounts (autofs), indirect, direct, and with nobody to ask, and the daemon in the tree that mounts what is asked for
// modes: pidns ns sealed
#include "zoo.h"
#include "autofs.h"
#include <sys/prctl.h>

static unsigned *mounted;

/* Mounts a file system with a file that tells how many there were before it. */
static void fill(const char *at)
{
	char path[PATH_MAX], count[16];
	int fd;

	TRY(mount("zoo", at, "tmpfs", 0, "size=64k"));
	snprintf(path, sizeof path, "%s/count", at);
	fd = TRY(open(path, O_WRONLY | O_CREAT, 0644));
	snprintf(count, sizeof count, "%u", (*mounted)++);
	CHECK_EQ(write(fd, count, strlen(count)), strlen(count));
	TRY(close(fd));
}

static void serve(int ready)
{
	int pipes[2], indirect, direct = -1, quiet, late = -1;
	unsigned long timeout = 300;
	char byte = 0;

	TRY(setsid());
	TRY(pipe(pipes));
	indirect = autofs_mount("indirect", pipes[1], "indirect");
	if (indirect < 0)
		byte = 's';
	else {
		direct = TRY(autofs_mount("direct", pipes[1], "direct"));
		late = TRY(autofs_mount("late", pipes[1], "direct"));
		quiet = TRY(autofs_mount("quiet", pipes[1], "indirect"));
		TRY(mkdir("quiet/key", 0755));
		TRY(ioctl(quiet, AUTOFS_IOC_CATATONIC, 0));
		TRY(close(quiet));
		TRY(ioctl(indirect, AUTOFS_IOC_SETTIMEOUT, &timeout));
		/* As with keys that are to be seen before they are used. */
		umask(0);
		TRY(mkdir("indirect/seen", 0705));
		TRY(mkdir("indirect/seen/below", 0750));
		TRY(mkdir("indirect/seen/below/it", 0700));
		TRY(mkdir("indirect/empty", 0700));
	}
	TRY(close(pipes[1]));
	CHECK_EQ(write(ready, &byte, 1), 1);
	while (!byte) {
		union autofs_v5_packet_union asked;
		char path[PATH_MAX];
		bool is_direct;

		autofs_read(pipes[0], &asked);
		is_direct = asked.hdr.type == autofs_ptype_missing_direct;
		CHECK(is_direct || asked.hdr.type == autofs_ptype_missing_indirect);
		if (!is_direct && !strcmp(asked.v5_packet.name, "none")) {
			TRY(ioctl(indirect, AUTOFS_IOC_FAIL, asked.v5_packet.wait_queue_token));
		} else if (!is_direct) {
			snprintf(path, sizeof path, "indirect/%s", asked.v5_packet.name);
			if (mkdir(path, 0755))
				CHECK_EQ(errno, EEXIST);
			fill(path);
			TRY(ioctl(indirect, AUTOFS_IOC_READY, asked.v5_packet.wait_queue_token));
		} else {
			struct stat root;
			bool is_late;

			TRY(fstat(late, &root));
			is_late = root.st_ino == asked.v5_packet.ino && asked.v5_packet.dev == root.st_dev;
			fill(is_late ? "late" : "direct");
			TRY(ioctl(is_late ? late : direct, AUTOFS_IOC_READY, asked.v5_packet.wait_queue_token));
			/* As automount(8) does: what is mounted hides it. */
			TRY(close(is_late ? late : direct));
		}
	}
	_exit(0);
}

static int count(const char *path)
{
	char text[16] = "";
	int fd = open(path, O_RDONLY);

	if (fd < 0)
		return -errno;
	TRY(read(fd, text, sizeof text - 1));
	TRY(close(fd));
	return atoi(text);
}

/* What the list of mounts says of the last one at a place, from the type on. */
static const char *shown(const char *place, const char *type)
{
	static char line[4096];
	char path[2 * PATH_MAX];
	FILE *list = fopen("/proc/self/mountinfo", "r");

	CHECK(list);
	snprintf(path, sizeof path, " %s/%s ", zoo_dir, place);
	while (fgets(line, sizeof line, list))
		if (strstr(line, path) && strstr(line, type)) {
			fclose(list);
			return strstr(line, type);
		}
	zoo_fail("no %s at %s", type, place);
}

static unsigned mode(const char *path)
{
	struct stat found;

	TRY(lstat(path, &found));
	return found.st_mode & 07777;
}

int main(void)
{
	int ready[2];
	char byte;
	pid_t daemon;

	mounted = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(mounted != MAP_FAILED);
	TRY(pipe(ready));
	daemon = TRY(fork());
	if (!daemon) {
		TRY(prctl(PR_SET_PDEATHSIG, SIGKILL));
		serve(ready[1]);
	}
	TRY(close(ready[1]));
	CHECK_EQ(read(ready[0], &byte, 1), 1);
	TRY(close(ready[0]));
	if (byte)
		zoo_skip("no autofs");
	CHECK_EQ(count("indirect/one/count"), 0);
	CHECK_EQ(count("direct/count"), 1);
	CHECK_EQ(count("indirect/none/count"), -ENOENT);
	zoo_ready();
	zoo_wait();
	/* What was there is there, and what was not is asked for. */
	CHECK_EQ(count("indirect/one/count"), 0);
	CHECK_EQ(count("direct/count"), 1);
	CHECK_EQ(mode("indirect/seen"), 0705);
	CHECK_EQ(mode("indirect/empty"), 0700);
	CHECK_EQ(count("indirect/two/count"), 2);
	CHECK_EQ(count("indirect/empty/count"), 3);
	CHECK_EQ(count("indirect/none/count"), -ENOENT);
	CHECK_EQ(count("late/count"), 4);
	CHECK_EQ(mode("indirect/seen/below"), 0750);
	CHECK_EQ(mode("indirect/seen/below/it"), 0700);
	CHECK(strstr(shown("indirect", " autofs "), "timeout=300"));
	CHECK(strstr(shown("direct", " autofs "), "direct"));
	CHECK(strstr(shown("quiet", " autofs "), "fd=-1"));
	CHECK_EQ(count("quiet/two/count"), -ENOENT);
	CHECK_EQ(mode("quiet/key"), 0755);
	TRY(kill(daemon, SIGKILL));
	CHECK_EQ(waitpid(daemon, NULL, 0), daemon);
	zoo_pass();
}
