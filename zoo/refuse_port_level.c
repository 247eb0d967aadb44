// area: refusals
// shows: all ports of devices, which a program may use itself (iopl), are refused with --strict
// modes: -userns
// dump: --strict
// expect: refused "all ports of devices"
#include "zoo.h"
#include <sys/io.h>

/* Where nothing is but what shows how far a machine has started. */
#define PORT 0x80

int main(void)
{
	if (iopl(3))
		zoo_skip("no ports of devices");
	zoo_ready();
	zoo_wait();
	outb(0, PORT);
	zoo_pass();
}
