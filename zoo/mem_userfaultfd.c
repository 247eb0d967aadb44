// area: memory
// shows: a userfaultfd with a registered area
// expect: refused "userfaultfd"
#include "zoo.h"
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sys/ioctl.h>

static char *area;
static int uffd;

static void *touch(void *arg)
{
	(void)arg;
	return (void *)(long)area[4096];
}

int main(void)
{
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register reg;
	struct uffdio_copy copy;
	struct uffd_msg msg;
	static char page[4096] __attribute__((aligned(4096)));
	pthread_t thread;
	void *value;

	uffd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
	if (uffd < 0)
		zoo_skip("no userfaultfd");
	TRY(ioctl(uffd, UFFDIO_API, &api));
	area = zoo_map(8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	area[0] = 5;
	reg = (struct uffdio_register){ { (unsigned long)area, 8192 }, UFFDIO_REGISTER_MODE_MISSING, 0 };
	TRY(ioctl(uffd, UFFDIO_REGISTER, &reg));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(area[0], 5);
	CHECK(pthread_create(&thread, NULL, touch, NULL) == 0);
	CHECK_EQ(read(uffd, &msg, sizeof msg), sizeof msg);
	CHECK_EQ(msg.event, UFFD_EVENT_PAGEFAULT);
	CHECK_EQ(msg.arg.pagefault.address & ~4095ul, (unsigned long)area + 4096);
	page[0] = 7;
	copy = (struct uffdio_copy){ (unsigned long)area + 4096, (unsigned long)page, 4096, 0, 0 };
	TRY(ioctl(uffd, UFFDIO_COPY, &copy));
	CHECK(pthread_join(thread, &value) == 0);
	CHECK_EQ((long)value, 7);
	zoo_pass();
}
