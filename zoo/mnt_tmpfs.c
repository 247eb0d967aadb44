// area: mounts
// shows: a tmpfs with content, an open file, size and mode; one read-only, one inside of another
// modes: pidns ns userns
#include "zoo.h"
#include <sys/mount.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>

static void put(const char *path, const char *text)
{
	int fd = TRY(open(path, O_WRONLY | O_CREAT, 0640));

	CHECK(write(fd, text, strlen(text)) >= 0);
	TRY(close(fd));
}

int main(void)
{
	struct statfs fs;
	struct stat st;
	int fd;

	TRY(mkdir("outer", 0755));
	TRY(mount("tmpfs", "outer", "tmpfs", MS_NOSUID | MS_NOATIME, "size=1048576,mode=0711"));
	TRY(mkdir("outer/dir", 0750));
	put("outer/dir/file", "content");
	TRY(chown("outer/dir/file", 3, 4));
	TRY(symlink("dir/file", "outer/link"));
	TRY(link("outer/dir/file", "outer/hard"));
	TRY(mkfifo("outer/fifo", 0600));
	fd = TRY(open("outer/open", O_RDWR | O_CREAT | O_APPEND, 0600));
	CHECK_EQ(write(fd, "abc", 3), 3);
	TRY(mkdir("outer/inner", 0755));
	put("outer/inner/hidden", "under the mount");
	TRY(mount("tmpfs", "outer/inner", "tmpfs", 0, ""));
	put("outer/inner/seen", "on the mount");
	TRY(mount(NULL, "outer/inner", NULL, MS_REMOUNT | MS_RDONLY, NULL));
	zoo_ready();
	zoo_wait();
	CHECK(strcmp(zoo_slurp("outer/link"), "content") == 0);
	TRY(stat("outer/hard", &st));
	CHECK_EQ(st.st_nlink, 2);
	CHECK_EQ(st.st_uid, 3);
	CHECK_EQ(st.st_gid, 4);
	TRY(stat("outer", &st));
	CHECK_EQ(st.st_mode & 0777, 0711);
	TRY(statfs("outer", &fs));
	CHECK_EQ(fs.f_blocks * fs.f_bsize, 1048576);
	CHECK_EQ(fs.f_flags & (ST_NOSUID | ST_NOATIME), ST_NOSUID | ST_NOATIME);
	CHECK_EQ(write(fd, "def", 3), 3);
	CHECK(strcmp(zoo_slurp("outer/open"), "abcdef") == 0);
	CHECK(strcmp(zoo_slurp("outer/inner/seen"), "on the mount") == 0);
	CHECK(open("outer/inner/new", O_CREAT | O_RDWR, 0600) < 0 && errno == EROFS);
	TRY(umount("outer/inner"));
	CHECK(strcmp(zoo_slurp("outer/inner/hidden"), "under the mount") == 0);
	zoo_pass();
}
