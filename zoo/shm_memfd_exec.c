// area: shared memory
// shows: a program in a memfd can be run
// foreign: yes
#include "zoo.h"

int main(void)
{
	int fd = TRY(memfd_create("program", MFD_CLOEXEC)), self = TRY(open("/proc/self/exe", O_RDONLY));
	char *args[] = { "program", "as-child", NULL }, buffer[65536];
	extern char **environ;
	ssize_t n;
	pid_t child;

	if (getenv("ZOO_CHILD"))
		_exit(23);
	while ((n = read(self, buffer, sizeof buffer)) > 0)
		CHECK_EQ(write(fd, buffer, n), n);
	close(self);
	zoo_ready();
	zoo_wait();
	child = TRY(fork());
	if (child == 0) {
		setenv("ZOO_CHILD", "1", 1);
		syscall(SYS_execveat, fd, "", args, environ, AT_EMPTY_PATH);
		_exit(1);
	}
	CHECK_EXIT(child, 23);
	zoo_pass();
}
