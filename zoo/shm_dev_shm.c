// area: shared memory
// shows: a POSIX shared memory object, mapped and unlinked
// foreign: yes
#include "zoo.h"

int main(void)
{
	struct stat here;
	char name[64], *area;
	int fd;

	/* Pids repeat in the namespaces of cases that run side by side; their directories do not. */
	TRY(stat(".", &here));
	snprintf(name, sizeof name, "/dev/shm/zoo-shm_dev_shm-%lu", (unsigned long) here.st_ino);
	fd = TRY(open(name, O_RDWR | O_CREAT | O_EXCL, 0600));
	TRY(ftruncate(fd, 1 << 20));
	area = zoo_map(1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd);
	close(fd);
	zoo_fill(area, 1 << 20, 5);
	TRY(unlink(name));
	zoo_ready();
	zoo_wait();
	CHECK(zoo_filled(area, 1 << 20, 5));
	CHECK(access(name, F_OK) < 0);
	zoo_pass();
}
