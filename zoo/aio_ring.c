// area: asynchronous I/O
// shows: a kernel AIO context is refused
// expect: refused "kernel AIO"
// expect: refused "AIO"
#include "zoo.h"
#include <linux/aio_abi.h>

static aio_context_t context;

static void submit(int fd, int count)
{
	static char text[64];
	struct iocb cb = { .aio_fildes = fd, .aio_lio_opcode = IOCB_CMD_PREAD, .aio_buf = (uintptr_t)text, .aio_nbytes = 4 };
	struct iocb *list = &cb;

	for (int i = 0; i < count; i++) {
		cb.aio_data = 1000 + i;
		CHECK_EQ(syscall(SYS_io_submit, context, 1, &list), 1);
	}
}

static void collect(int count, int from)
{
	for (int i = 0; i < count; i++) {
		struct io_event event;

		CHECK_EQ(syscall(SYS_io_getevents, context, 1, 1, &event, NULL), 1);
		CHECK_EQ(event.res, 4);
		CHECK_EQ(event.data, 1000 + from + i);
	}
}

int main(void)
{
	int fd = TRY(open("file", O_RDWR | O_CREAT, 0600));

	CHECK_EQ(write(fd, "data", 4), 4);
	TRY(syscall(SYS_io_setup, 16, &context));
	for (int round = 0; round < 100; round++) {
		submit(fd, 7);
		collect(7, 0);
	}
	/* Five answers are in the ring and not yet read. */
	submit(fd, 5);
	zoo_ready();
	zoo_wait();
	collect(5, 0);
	for (int round = 0; round < 100; round++) {
		submit(fd, 7);
		collect(7, 0);
	}
	TRY(syscall(SYS_io_destroy, context));
	zoo_pass();
}
