/* The server of a FUSE file system that is a single file, whose reads are counted. */
#include <errno.h>
#include <linux/fuse.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

/* Puts the file over another one, for a user. */
static inline int fuse_mount(int fd, const char *path, unsigned user)
{
	char options[80];

	snprintf(options, sizeof options, "fd=%d,rootmode=100000,user_id=%u,group_id=%u", fd, user, user);
	return mount("counted", path, "fuse", 0, options);
}

/* Waits for a request and answers it; false if there will be none. */
static inline bool fuse_answer(int fd, unsigned *reads)
{
	static char request[(1 << 17) + 4096];
	static bool agreed;
	struct fuse_in_header *in = (void *)request;
	struct fuse_read_in *wanted = (void *)(in + 1);
	struct {
		struct fuse_out_header head;
		union {
			struct fuse_init_out init;
			struct fuse_attr_out attr;
			struct fuse_open_out open;
			char text[16];
		};
	} out = { };
	size_t length = 0;

	if (read(fd, request, sizeof request) < (ssize_t)sizeof *in)
		return errno == EINTR;
	switch (in->opcode) {
	case FUSE_INIT:
		/* A server agrees once, as libfuse has it. */
		if (agreed) {
			out.head.error = -EIO;
			break;
		}
		agreed = true;
		out.init = (struct fuse_init_out){ .major = 7, .minor = 31, .max_write = 4096 };
		length = sizeof out.init;
		break;
	case FUSE_GETATTR:
		out.attr.attr = (struct fuse_attr){ .ino = 1, .mode = S_IFREG | 0644, .nlink = 1, .size = 8 };
		length = sizeof out.attr;
		break;
	case FUSE_OPEN:
		out.open.open_flags = FOPEN_DIRECT_IO;
		length = sizeof out.open;
		break;
	case FUSE_READ:
		if (wanted->offset == 0)
			length = (size_t)snprintf(out.text, sizeof out.text, "read %u", ++*reads);
		break;
	case FUSE_FLUSH:
	case FUSE_RELEASE:
		break;
	case FUSE_FORGET:
	case FUSE_BATCH_FORGET:
	case FUSE_INTERRUPT:
		return true;
	default:
		out.head.error = -ENOSYS;
	}
	out.head.len = (unsigned)(sizeof out.head + length);
	out.head.unique = in->unique;
	return write(fd, &out, out.head.len) == out.head.len || errno == ENOENT;
}
