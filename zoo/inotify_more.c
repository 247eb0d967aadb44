// area: event descriptors
// shows: inotify: a watch on the root of a mount, on a symbolic link, on a file that is open elsewhere under an old name, a high number, and one that is to report once
// foreign: yes
// options: --link-remap
// modes: plain pidns ns userns
#include "zoo.h"
#include <sys/inotify.h>

static char buffer[4096] __attribute__((aligned(8)));

static void expect(int fd, int wd, uint32_t mask)
{
	struct inotify_event *ev = (void *)buffer;

	/* One event: none of them has a name. */
	CHECK_EQ(read(fd, buffer, sizeof *ev), sizeof *ev);
	CHECK_EQ(ev->wd, wd);
	CHECK_EQ(ev->mask, mask);
}

int main(void)
{
	int fd = TRY(inotify_init1(IN_NONBLOCK)), quiet = TRY(inotify_init1(0)), file, soft, moved, all, copy;

	CHECK_EQ(syscall(SYS_ioctl, fd, 0x40044900, 123456789), 0);
	all = TRY(inotify_add_watch(fd, ".", IN_ALL_EVENTS));
	CHECK_EQ(all, 123456789);
	/* The program tells the harness by files here that it is ready. */
	TRY(inotify_rm_watch(fd, all));
	CHECK(read(fd, buffer, sizeof buffer) > 0);
	TRY(mkdir("dir", 0755));
	/* Not whether it is opened: the harness looks at files, too. */
	all = TRY(inotify_add_watch(fd, "dir", IN_ALL_EVENTS & ~(IN_OPEN | IN_ACCESS | IN_CLOSE)));
	file = TRY(open("old", O_RDWR | O_CREAT, 0600));
	TRY(symlink("nowhere", "link"));
	soft = TRY(inotify_add_watch(quiet, "link", IN_ATTRIB | IN_DONT_FOLLOW));
	TRY(link("old", "new"));
	moved = TRY(inotify_add_watch(quiet, "old", IN_MODIFY | IN_ONESHOT));
	TRY(unlink("old"));
	copy = TRY(dup(quiet));
	zoo_ready();
	zoo_wait();
	CHECK(read(fd, buffer, sizeof buffer) < 0 && errno == EAGAIN);
	TRY(chmod("dir", 0700));
	expect(fd, all, IN_ATTRIB | IN_ISDIR);
	CHECK_EQ(write(file, "x", 1), 1);
	expect(quiet, moved, IN_MODIFY);
	expect(copy, moved, IN_IGNORED);
	TRY(lchown("link", getuid(), getgid()));
	expect(copy, soft, IN_ATTRIB);
	zoo_pass();
}
