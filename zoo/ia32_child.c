// area: 32-bit programs
// shows: the 32-bit child of a 64-bit program, with nothing but pause(2), goes on
// foreign: yes
#include "zoo.h"

/* An ELF file of one segment at 8048000, and pause(2) for ever. */
static const unsigned char program[] = {
	0x7f, 'E', 'L', 'F', 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0,
	2, 0, 3, 0, 1, 0, 0, 0, 0x54, 0x80, 4, 8, 0x34, 0, 0, 0,
	0, 0, 0, 0, 0, 0, 0, 0, 0x34, 0, 0x20, 0, 1, 0, 0, 0,
	0, 0, 0, 0,
	1, 0, 0, 0, 0, 0, 0, 0, 0, 0x80, 4, 8, 0, 0x80, 4, 8,
	0x5d, 0, 0, 0, 0x5d, 0, 0, 0, 5, 0, 0, 0, 0, 0x10, 0, 0,
	0xb8, 0x1d, 0, 0, 0, 0xcd, 0x80, 0xeb, 0xf7,
};

int main(void)
{
	int fd = TRY(open("thirty-two", O_WRONLY | O_CREAT, 0700)), status;
	char path[64], exe[PATH_MAX] = "";
	pid_t child;

	CHECK_EQ(write(fd, program, sizeof program), sizeof program);
	TRY(close(fd));
	child = TRY(fork());
	if (!child) {
		execl("./thirty-two", "thirty-two", NULL);
		_exit(77);
	}
	snprintf(path, sizeof path, "/proc/%d/exe", child);
	while (!strstr(exe, "/thirty-two")) {
		if (waitpid(child, &status, WNOHANG) == child)
			zoo_skip("this kernel runs no 32-bit programs");
		exe[readlink(path, exe, sizeof exe - 1) > 0 ? sizeof exe - 1 : 0] = 0;
	}
	zoo_ready();
	zoo_wait();
	CHECK_EQ(waitpid(child, &status, WNOHANG), 0);
	TRY(kill(child, SIGKILL));
	CHECK_EQ(waitpid(child, &status, 0), child);
	zoo_pass();
}
