// area: refusals
// shows: a thread that has chosen rules for speculation (prctl) is refused with --strict
// dump: --strict
// expect: refused "its rules for speculation"
#include "zoo.h"
#include <sys/prctl.h>

int main(void)
{
	static const unsigned long what[] = { PR_SPEC_STORE_BYPASS, PR_SPEC_INDIRECT_BRANCH };
	unsigned n;

	for (n = 0; prctl(PR_SET_SPECULATION_CTRL, what[n], PR_SPEC_DISABLE, 0, 0);)
		if (++n == 2)
			zoo_skip("a processor on which nothing is to be chosen");
	zoo_ready();
	zoo_wait();
	CHECK(prctl(PR_GET_SPECULATION_CTRL, what[n], 0, 0, 0) & PR_SPEC_DISABLE);
	zoo_pass();
}
