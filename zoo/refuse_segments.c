// area: refusals
// shows: a table of segments of the program's own is refused with --strict
// dump: --strict
// expect: refused "table of segments"
#include "zoo.h"
#include <asm/ldt.h>

int main(void)
{
	struct user_desc segment = { .entry_number = 0, .limit = 0xfffff, .seg_32bit = 1, .limit_in_pages = 1,
				     .useable = 1 };
	char table[64];

	if (syscall(SYS_modify_ldt, 1, &segment, sizeof segment) < 0)
		zoo_skip("no modify_ldt");
	zoo_ready();
	zoo_wait();
	CHECK_EQ((int)syscall(SYS_modify_ldt, 0, table, sizeof table), 64);
	zoo_pass();
}
