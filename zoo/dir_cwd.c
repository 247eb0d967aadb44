// area: directories
// shows: working directory and umask, in a process and its child
// foreign: yes
#include "zoo.h"

int main(void)
{
	char path[PATH_MAX], want[PATH_MAX + 16];
	pid_t child;

	TRY(mkdir("inner", 0755));
	TRY(mkdir("other", 0755));
	child = TRY(fork());
	TRY(chdir(child ? "inner" : "other"));
	umask(child ? 0123 : 0345);
	if (child == 0)
		zoo_tell("child");
	else {
		zoo_await("child");
		zoo_ready();
	}
	zoo_wait();
	snprintf(want, sizeof want, "%s/%s", zoo_dir, child ? "inner" : "other");
	CHECK(getcwd(path, sizeof path));
	CHECK(strcmp(path, want) == 0);
	CHECK_EQ(umask(0), child ? 0123 : 0345);
	if (child == 0)
		_exit(0);
	CHECK_EXIT(child, 0);
	zoo_pass();
}
