// area: mounts
// shows: access control lists of files and directories of a tmpfs, of users with and without a name
// modes: pidns ns userns
#include "zoo.h"
#include <grp.h>
#include <linux/posix_acl.h>
#include <linux/posix_acl_xattr.h>
#include <sys/mount.h>
#include <sys/xattr.h>

#define ACCESS "system.posix_acl_access"
#define DEFAULT "system.posix_acl_default"

/* A user whose id has a name on every host, and one whose id has none on most. */
#define NAMED 1
#define NAMELESS 54321

struct list {
	struct posix_acl_xattr_header header;
	struct posix_acl_xattr_entry entries[7];
};

static const struct list list = {
	{ POSIX_ACL_XATTR_VERSION },
	{
		{ ACL_USER_OBJ, ACL_READ | ACL_WRITE, ACL_UNDEFINED_ID },
		{ ACL_USER, ACL_READ | ACL_WRITE, NAMED },
		{ ACL_USER, ACL_READ, NAMELESS },
		{ ACL_GROUP_OBJ, 0, ACL_UNDEFINED_ID },
		{ ACL_GROUP, ACL_READ, NAMED },
		{ ACL_MASK, ACL_READ | ACL_WRITE, ACL_UNDEFINED_ID },
		{ ACL_OTHER, 0, ACL_UNDEFINED_ID },
	},
};

/* Has a file this list, or none? */
static bool has(const char *path, const char *name, const struct list *expected)
{
	struct list found;
	ssize_t len = getxattr(path, name, &found, sizeof found);

	if (!expected)
		return len < 0 && errno == ENODATA;
	return len == sizeof found && memcmp(&found, expected, sizeof found) == 0;
}

static void make(const char *path)
{
	close(TRY(open(path, O_WRONLY | O_CREAT, 0660)));
}

/* Can a user open a file, whose path starts at the mount, for this? */
static bool can(uid_t uid, const char *path, int how)
{
	pid_t pid = TRY(fork());
	int status;

	if (pid == 0)
		/* The user that it becomes may not search the start directory. */
		_exit(chdir("fs") || setgroups(0, NULL) || setresgid(uid, uid, uid) ||
		      setresuid(uid, uid, uid) || open(path, how) < 0);
	status = zoo_reap(pid);
	return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static void check(void)
{
	CHECK(has("fs/file", ACCESS, &list));
	CHECK(has("fs/dir", DEFAULT, &list));
	CHECK(has("fs/dir", ACCESS, NULL));
	CHECK(has("fs/dir/heir", ACCESS, &list));
	CHECK(has("fs/dir/moved", ACCESS, NULL));
	CHECK(can(NAMED, "file", O_RDWR));
	CHECK(can(NAMELESS, "file", O_RDONLY));
	CHECK(!can(NAMELESS, "file", O_RDWR));
	CHECK(!can(NAMED + 1, "file", O_RDONLY));
	CHECK(can(NAMED, "dir/heir", O_RDWR));
	CHECK(!can(NAMED, "dir/moved", O_RDWR));
}

int main(void)
{
	umask(0);
	TRY(mkdir("fs", 0755));
	TRY(mount("tmpfs", "fs", "tmpfs", 0, "mode=0755"));
	make("fs/file");
	make("fs/moved");
	TRY(mkdir("fs/dir", 0755));
	TRY(setxattr("fs/file", ACCESS, &list, sizeof list, 0));
	TRY(setxattr("fs/dir", DEFAULT, &list, sizeof list, 0));
	make("fs/dir/heir");
	TRY(rename("fs/moved", "fs/dir/moved"));
	check();
	zoo_ready();
	zoo_wait();
	check();
	zoo_pass();
}
