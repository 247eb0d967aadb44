// area: asynchronous I/O
// shows: contexts of kernel AIO: unread answers, a ring that has wrapped around, numbers with a hole
// foreign: yes
#include "zoo.h"
#include <linux/aio_abi.h>

static char text[64];

static void submit(aio_context_t context, int fd, int count)
{
	struct iocb cb = { .aio_fildes = fd, .aio_lio_opcode = IOCB_CMD_PREAD, .aio_buf = (uintptr_t)text, .aio_nbytes = 4 };
	struct iocb *list = &cb;

	for (int i = 0; i < count; i++) {
		cb.aio_data = 1000 + i;
		CHECK_EQ(syscall(SYS_io_submit, context, 1, &list), 1);
	}
}

static void collect(aio_context_t context, int count)
{
	for (int i = 0; i < count; i++) {
		struct io_event event;

		CHECK_EQ(syscall(SYS_io_getevents, context, 1, 1, &event, NULL), 1);
		CHECK_EQ(event.res, 4);
		CHECK_EQ(event.data, 1000 + i);
	}
	CHECK_EQ(syscall(SYS_io_getevents, context, 0, 1, &(struct io_event){ 0 }, &(struct timespec){ 0 }), 0);
}

static void turn(aio_context_t context, int fd)
{
	for (int round = 0; round < 100; round++) {
		submit(context, fd, 7);
		collect(context, 7);
	}
}

int main(void)
{
	int fd = TRY(open("file", O_RDWR | O_CREAT, 0600));
	aio_context_t gone = 0, small = 0, large = 0;
	pid_t child;

	CHECK_EQ(write(fd, "data", 4), 4);
	TRY(syscall(SYS_io_setup, 1, &gone));
	TRY(syscall(SYS_io_setup, 16, &small));
	TRY(syscall(SYS_io_setup, 1000, &large));
	TRY(syscall(SYS_io_destroy, gone));
	/* A child has no contexts. */
	child = TRY(fork());
	if (!child)
		for (;;)
			pause();
	turn(small, fd);
	/* Five answers are in the ring and not yet read. */
	submit(small, fd, 5);
	submit(large, fd, 900);
	zoo_ready();
	zoo_wait();
	CHECK_EQ(kill(child, SIGKILL), 0);
	collect(small, 5);
	collect(large, 900);
	turn(small, fd);
	turn(large, fd);
	TRY(syscall(SYS_io_destroy, small));
	TRY(syscall(SYS_io_destroy, large));
	CHECK_EQ(syscall(SYS_io_destroy, gone), -1);
	zoo_pass();
}
