// area: refusals
// shows: a mount with the formats of the host (binfmt_misc) is refused by name
// modes: ns
// expect: refused "its formats are those of this host"
#include "zoo.h"
#include <sys/mount.h>

int main(void)
{
	TRY(mkdir("formats", 0755));
	if (mount("binfmt", "formats", "binfmt_misc", 0, NULL))
		zoo_skip("no binfmt_misc");
	zoo_ready();
	zoo_wait();
	TRY(access("formats/status", F_OK));
	zoo_pass();
}
