// area: refusals
// shows: a session with a nice value (autogroup) is refused with --strict
// dump: --strict
// expect: refused "the nice value of its session (autogroup)"
#include "zoo.h"

int main(void)
{
	char text[64] = "";
	int file = open("/proc/self/autogroup", O_RDWR | O_CLOEXEC);

	if (file < 0 || getsid(0) != getpid() || write(file, "5", 1) != 1)
		zoo_skip("no groups of sessions");
	TRY(pread(file, text, sizeof text - 1, 0));
	CHECK(strstr(text, " nice 5"));
	close(file);
	zoo_ready();
	zoo_wait();
	zoo_pass();
}
