// area: event descriptors
// shows: eventfds: counter, semaphore mode, flags, sharing
// foreign: no CRIU's images do not say that one is a semaphore
#include "zoo.h"
#include <sys/eventfd.h>

int main(void)
{
	int counter = TRY(eventfd(7, EFD_NONBLOCK)), semaphore = TRY(eventfd(3, EFD_SEMAPHORE | EFD_CLOEXEC));
	int large = TRY(eventfd(0, EFD_NONBLOCK)), copy = TRY(dup(counter));
	uint64_t value = UINT64_MAX - 1;
	char path[64];

	CHECK_EQ(write(large, &value, 8), 8);
	snprintf(path, sizeof path, "/proc/self/fdinfo/%d", semaphore);
	if (!strstr(zoo_slurp(path), "eventfd-semaphore"))
		zoo_skip("the kernel does not tell which eventfds are semaphores");
	zoo_ready();
	zoo_wait();
	CHECK_EQ(fcntl(counter, F_GETFL) & O_NONBLOCK, O_NONBLOCK);
	CHECK_EQ(fcntl(semaphore, F_GETFL) & O_NONBLOCK, 0);
	CHECK_EQ(fcntl(semaphore, F_GETFD), FD_CLOEXEC);
	value = 5;
	CHECK_EQ(write(copy, &value, 8), 8);
	CHECK_EQ(read(counter, &value, 8), 8);
	CHECK_EQ(value, 12);
	CHECK_EQ(read(semaphore, &value, 8), 8);
	CHECK_EQ(value, 1);
	value = 1;
	CHECK(write(large, &value, 8) < 0 && errno == EAGAIN);
	CHECK_EQ(read(large, &value, 8), 8);
	CHECK_EQ(value, UINT64_MAX - 1);
	zoo_pass();
}
