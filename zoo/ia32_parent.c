// area: 32-bit programs
// shows: the 64-bit child of a 32-bit program goes on
// build: -m32
// foreign: yes
#include "zoo.h"

/* An ELF file of one segment at 400000, and pause(2) for ever. */
static const unsigned char program[] = {
	0x7f, 'E', 'L', 'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0,
	2, 0, 0x3e, 0, 1, 0, 0, 0, 0x78, 0, 0x40, 0, 0, 0, 0, 0,
	0x40, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
	0, 0, 0, 0, 0x40, 0, 0x38, 0, 1, 0, 0, 0, 0, 0, 0, 0,
	1, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
	0, 0, 0x40, 0, 0, 0, 0, 0, 0, 0, 0x40, 0, 0, 0, 0, 0,
	0x81, 0, 0, 0, 0, 0, 0, 0, 0x81, 0, 0, 0, 0, 0, 0, 0,
	0, 0x10, 0, 0, 0, 0, 0, 0,
	0xb8, 0x22, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xf7,
};

int main(void)
{
	int fd = TRY(open("sixty-four", O_WRONLY | O_CREAT, 0700)), status;
	char path[64], exe[PATH_MAX] = "";
	pid_t child;

	CHECK_EQ(write(fd, program, sizeof program), sizeof program);
	TRY(close(fd));
	child = TRY(fork());
	if (!child) {
		execl("./sixty-four", "sixty-four", NULL);
		_exit(77);
	}
	snprintf(path, sizeof path, "/proc/%d/exe", child);
	while (!strstr(exe, "/sixty-four")) {
		CHECK_EQ(waitpid(child, &status, WNOHANG), 0);
		exe[readlink(path, exe, sizeof exe - 1) > 0 ? sizeof exe - 1 : 0] = 0;
	}
	zoo_ready();
	zoo_wait();
	CHECK_EQ(waitpid(child, &status, WNOHANG), 0);
	TRY(kill(child, SIGKILL));
	CHECK_EQ(waitpid(child, &status, 0), child);
	CHECK_EQ(status, SIGKILL);
	zoo_pass();
}
