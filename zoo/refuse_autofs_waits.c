// area: refusals
// shows: a task that waits for an automatic mount (autofs), whose daemon stops as well, is refused by name
// modes: pidns ns
// expect: refused "an automatic mount"
#include "zoo.h"
#include "autofs.h"

int main(void)
{
	union autofs_v5_packet_union asked;
	int fds[2], root;
	pid_t child;

	root = autofs_awaited(fds, &child);
	autofs_read(fds[0], &asked);
	zoo_ready();
	zoo_wait();
	TRY(ioctl(root, AUTOFS_IOC_FAIL, asked.v5_packet.wait_queue_token));
	CHECK_EXIT(child, ENOENT);
	zoo_pass();
}
