// area: files
// shows: O_PATH descriptors on a file, a directory and a symbolic link
// foreign: yes
#include "zoo.h"

int main(void)
{
	int file, dir, symlink_fd;
	char text[64];
	struct stat st;

	close(TRY(open("file", O_RDWR | O_CREAT, 0600)));
	TRY(symlink("where/it/points", "link"));
	file = TRY(open("file", O_PATH));
	dir = TRY(open(".", O_PATH | O_DIRECTORY));
	symlink_fd = TRY(open("link", O_PATH | O_NOFOLLOW | O_CLOEXEC));
	zoo_ready();
	zoo_wait();
	CHECK(read(file, text, 1) < 0 && errno == EBADF);
	CHECK_EQ(fcntl(file, F_GETFL) & O_PATH, O_PATH);
	TRY(fstatat(dir, "file", &st, 0));
	TRY(fstat(symlink_fd, &st));
	CHECK(S_ISLNK(st.st_mode));
	CHECK_EQ(readlinkat(symlink_fd, "", text, sizeof text), 15);
	CHECK(memcmp(text, "where/it/points", 15) == 0);
	CHECK_EQ(fcntl(symlink_fd, F_GETFD), FD_CLOEXEC);
	zoo_pass();
}
