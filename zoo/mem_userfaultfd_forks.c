// area: memory
// shows: a userfaultfd that tells of forks, moves and drops; and of a child's memory by one of its own
// modes: plain leave-running cow rounds lazy compressed pidns ns sealed
// foreign: no CRIU keeps no userfaultfd
#include "userfaultfd.h"
#include <sys/mman.h>

static int fd;

/* Reads the next event, which must be of this kind. */
static struct uffd_msg event(int from, int kind)
{
	struct uffd_msg msg;

	CHECK_EQ(read(from, &msg, sizeof msg), sizeof msg);
	CHECK_EQ(msg.event, kind);
	return msg;
}

static void *drop(void *at)
{
	TRY(madvise(at, 4096, MADV_DONTNEED));
	return NULL;
}

static void *bear(void *at)
{
	pid_t child = TRY(fork());

	if (!child)
		_exit(*(volatile char *)at == 'c' ? 0 : 1);
	CHECK_EXIT(child, 0);
	return NULL;
}

int main(void)
{
	char *area = zoo_map(4 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	struct uffd_msg msg;
	pthread_t thread;
	int childs;

	fd = uffd_open(O_CLOEXEC, UFFD_FEATURE_EVENT_FORK | UFFD_FEATURE_EVENT_REMAP | UFFD_FEATURE_EVENT_REMOVE |
					  UFFD_FEATURE_EVENT_UNMAP);
	uffd_register(fd, area, 4 * 4096, UFFDIO_REGISTER_MODE_MISSING);
	uffd_fill(fd, area, 'a');
	zoo_ready();
	zoo_wait();
	CHECK_EQ(area[0], 'a');
	thread = uffd_start(drop, area);
	msg = event(fd, UFFD_EVENT_REMOVE);
	CHECK_EQ(msg.arg.remove.start, (uintptr_t)area);
	uffd_join(thread);
	thread = uffd_start(bear, area + 8192);
	childs = (int)event(fd, UFFD_EVENT_FORK).arg.fork.ufd;
	uffd_expect(childs, area + 8192);
	uffd_fill(childs, area + 8192, 'c');
	uffd_join(thread);
	zoo_pass();
}
