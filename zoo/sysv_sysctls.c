// area: System V and POSIX IPC
// shows: the limits of an IPC namespace
// modes: ns userns
#include "zoo.h"

static const char *names[] = { "msgmax", "msgmnb", "msgmni", "shmmax", "shmall", "shmmni", "sem", "shm_rmid_forced" };

int main(void)
{
	char before[8][128], path[64], text[16] = "";
	int shmmni;

	for (int i = 0; i < 8; i++) {
		const char *values[] = { "8000", "16000", "1234", "123456789", "1234567", "777", "300 30000 200 300", "1" };
		int fd;

		snprintf(path, sizeof path, "/proc/sys/kernel/%s", names[i]);
		fd = TRY(open(path, O_WRONLY));
		CHECK(write(fd, values[i], strlen(values[i])) > 0);
		TRY(close(fd));
		snprintf(before[i], sizeof before[i], "%.127s", zoo_slurp(path));
	}
	shmmni = TRY(open("/proc/sys/kernel/shmmni", O_RDONLY));
	zoo_ready();
	zoo_wait();
	for (int i = 0; i < 8; i++) {
		snprintf(path, sizeof path, "/proc/sys/kernel/%s", names[i]);
		if (strcmp(zoo_slurp(path), before[i]))
			zoo_fail("%s was %s and is %s", names[i], before[i], zoo_slurp(path));
	}
	CHECK(pread(shmmni, text, sizeof text - 1, 0) > 0);
	CHECK_EQ(atoi(text), 777);
	zoo_pass();
}
