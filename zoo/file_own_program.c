// area: files
// shows: a descriptor on the task's own program, and the link to it
// foreign: yes
#include "zoo.h"

int main(void)
{
	char before[PATH_MAX], after[PATH_MAX], magic[4];
	int fd = TRY(open("/proc/self/exe", O_RDONLY));
	ssize_t len = TRY(readlink("/proc/self/exe", before, sizeof before));

	zoo_ready();
	zoo_wait();
	CHECK_EQ(readlink("/proc/self/exe", after, sizeof after), len);
	CHECK(memcmp(before, after, len) == 0);
	CHECK_EQ(lseek(fd, 0, SEEK_CUR), 0);
	CHECK_EQ(read(fd, magic, 4), 4);
	CHECK(memcmp(magic, "\177ELF", 4) == 0);
	zoo_pass();
}
