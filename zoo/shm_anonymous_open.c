// area: shared memory
// shows: shared anonymous memory that is open by the link of a mapping in /proc/PID/map_files, also when nobody maps it any more
// modes: plain leave-running pidns ns
// foreign: no CRIU keeps no shared anonymous memory that is open
#include "zoo.h"

#define LEN (1ul << 20)

static int open_mapping(char *area, int flags)
{
	char path[96];

	snprintf(path, sizeof path, "/proc/self/map_files/%lx-%lx", (long)area, (long)area + LEN);
	return open(path, flags);
}

int main(void)
{
	char *area = zoo_map(LEN, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1);
	char *gone = zoo_map(LEN, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1), *again;
	int fd = open_mapping(area, O_RDWR), only = open_mapping(gone, O_RDONLY);
	char got[16];

	if (fd < 0 || only < 0)
		zoo_skip("map_files may not be opened");
	zoo_fill(area, LEN, 7);
	strcpy(gone + LEN / 2, "still here");
	TRY(munmap(gone, LEN));
	TRY(lseek(fd, 4096, SEEK_SET));
	zoo_ready();
	zoo_wait();
	CHECK(zoo_filled(area, LEN, 7));
	CHECK_EQ(write(fd, "written", 7), 7);
	CHECK(memcmp(area + 4096, "written", 7) == 0);
	again = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(again != MAP_FAILED);
	again[100] = 42;
	CHECK_EQ(area[100], 42);
	CHECK_EQ(pread(only, got, 11, LEN / 2), 11);
	CHECK(strcmp(got, "still here") == 0);
	zoo_pass();
}
