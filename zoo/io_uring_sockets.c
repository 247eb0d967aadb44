// area: asynchronous I/O
// shows: sockets that are registered with an io_uring instance, between empty places, and a table of nothing but these
// foreign: no CRIU keeps no io_uring
#include "io_uring.h"
#include <sys/socket.h>

#define PLACES 2000

static void receive(struct ring *ring, int from, unsigned place, const char *text)
{
	char got[8] = "";
	unsigned index = *ring->sq_tail & (ring->entries - 1);

	CHECK_EQ(send(from, text, 5, 0), 5);
	ring_add(ring, IORING_OP_RECV, (int)place, got, 5, 0, place);
	ring->sqes[index].flags = IOSQE_FIXED_FILE;
	ring_enter(ring, 1);
	ring_expect(ring, place, 5);
	CHECK(!strcmp(got, text));
}

int main(void)
{
	struct io_uring_rsrc_register empty = { .nr = PLACES, .flags = IORING_RSRC_REGISTER_SPARSE };
	struct io_uring_files_update update = { .offset = PLACES - 1 };
	int one[2], two[2], files[4];
	struct ring ring, sparse;

	if (!ring_setup(&ring, 8, 0) || !ring_setup(&sparse, 8, 0))
		zoo_skip("no io_uring");
	TRY(socketpair(AF_UNIX, SOCK_STREAM, 0, one));
	TRY(socketpair(AF_UNIX, SOCK_DGRAM, 0, two));
	files[0] = files[2] = -1;
	files[1] = one[0];
	files[3] = two[0];
	CHECK_EQ(ring_register(ring.fd, IORING_REGISTER_FILES, files, 4), 0);
	if (ring_register(sparse.fd, IORING_REGISTER_FILES2, &empty, sizeof empty))
		zoo_skip("no sparse tables of files");
	zoo_ready();
	zoo_wait();
	receive(&ring, one[1], 1, "first");
	receive(&ring, two[1], 3, "other");
	update.fds = (uintptr_t)&one[0];
	CHECK_EQ(ring_register(sparse.fd, IORING_REGISTER_FILES_UPDATE, &update, 1), 1);
	receive(&sparse, one[1], PLACES - 1, "third");
	update.offset = PLACES;
	CHECK_EQ(ring_register(sparse.fd, IORING_REGISTER_FILES_UPDATE, &update, 1), -1);
	zoo_pass();
}
