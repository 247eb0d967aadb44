// area: refusals
// shows: ports of devices that a program may use itself (ioperm) are refused with --strict
// modes: -userns
// dump: --strict
// expect: refused "ports of devices"
#include "zoo.h"
#include <sys/io.h>

/* Where nothing is but what shows how far a machine has started. */
#define PORT 0x80

int main(void)
{
	if (ioperm(PORT, 1, 1))
		zoo_skip("no ports of devices");
	zoo_ready();
	zoo_wait();
	outb(0, PORT);
	zoo_pass();
}
