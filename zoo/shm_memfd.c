// area: shared memory
// shows: a memfd: its content, name, offset, seals, and its shared and private mappings
// foreign: yes
#include "zoo.h"

int main(void)
{
	int fd = TRY(memfd_create("zoo-memfd", MFD_ALLOW_SEALING)), again;
	char link[64], *shared, *private;
	struct stat before, after;

	TRY(ftruncate(fd, 65536));
	shared = zoo_map(65536, PROT_READ | PROT_WRITE, MAP_SHARED, fd);
	private = zoo_map(65536, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd);
	zoo_fill(shared, 65536, 1);
	zoo_fill(private, 4096, 2);
	TRY(lseek(fd, 1234, SEEK_SET));
	TRY(fcntl(fd, F_ADD_SEALS, F_SEAL_GROW));
	TRY(fchmod(fd, 0640));
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	again = TRY(open(link, O_RDONLY));
	TRY(fstat(fd, &before));
	zoo_ready();
	zoo_wait();
	TRY(fstat(fd, &after));
	CHECK_EQ(after.st_mode, before.st_mode);
	CHECK_EQ(after.st_size, 65536);
	CHECK_EQ(lseek(fd, 0, SEEK_CUR), 1234);
	CHECK_EQ(lseek(again, 0, SEEK_CUR), 0);
	CHECK_EQ(fcntl(fd, F_GET_SEALS), F_SEAL_GROW);
	CHECK_EQ(fcntl(again, F_GETFL) & O_ACCMODE, O_RDONLY);
	CHECK(zoo_filled(shared, 65536, 1));
	CHECK(zoo_filled(private, 4096, 2));
	CHECK(memcmp(shared + 4096, private + 4096, 61440) == 0);
	shared[8192] = 77;
	CHECK_EQ(private[8192], 77);
	CHECK_EQ(pread(again, link, 1, 8192), 1);
	CHECK_EQ(link[0], 77);
	zoo_pass();
}
