// area: memory
// shows: pages that were read but never written, and pages written with zeroes
// foreign: yes
#include "zoo.h"

#define SIZE (8ul << 20)

int main(void)
{
	volatile char *read_only = zoo_map(SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	char *zeroed = zoo_map(SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	int fd = TRY(open("/dev/zero", O_RDWR));
	char *device = zoo_map(SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd);
	size_t sum = 0;

	for (size_t i = 0; i < SIZE; i += 4096)
		sum += read_only[i];
	memset(zeroed, 0, SIZE);
	zoo_fill(device, 4096, 1);
	zoo_ready();
	zoo_wait();
	for (size_t i = 0; i < SIZE; i++)
		sum += read_only[i] + zeroed[i];
	CHECK_EQ(sum, 0);
	CHECK(zoo_filled(device, 4096, 1));
	CHECK_EQ(device[8192], 0);
	zoo_pass();
}
