// area: asynchronous I/O
// shows: POSIX asynchronous I/O by library threads: a read that waits for a pipe
// foreign: yes
// build: -lrt
#include "zoo.h"
#include <aio.h>

int main(void)
{
	static char text[8];
	struct aiocb cb = { .aio_buf = text, .aio_nbytes = 4 };
	const struct aiocb *list[] = { &cb };
	int ends[2];

	if (access("/lib/x86_64-linux-gnu/libc.so.6", F_OK))
		zoo_skip("no libc in this root");
	TRY(pipe(ends));
	cb.aio_fildes = ends[0];
	TRY(aio_read(&cb));
	zoo_sleep_ms(20);
	zoo_ready();
	zoo_wait();
	/* The library's thread may have been interrupted in its read by the restore. */
	CHECK(aio_error(&cb) == EINPROGRESS || aio_error(&cb) == EINTR);
	if (aio_error(&cb) == EINTR)
		TRY(aio_read(&cb));
	CHECK_EQ(write(ends[1], "data", 4), 4);
	TRY(aio_suspend(list, 1, NULL));
	CHECK_EQ(aio_return(&cb), 4);
	CHECK(memcmp(text, "data", 4) == 0);
	zoo_pass();
}
