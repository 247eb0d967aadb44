// area: credentials
// shows: user and group ids of all kinds, supplementary groups, and the file system ids
// foreign: yes
#include "zoo.h"
#include <grp.h>
#include <sys/fsuid.h>

int main(void)
{
	gid_t groups[] = { 7, 21, 4000, 12345 }, now[8];
	uid_t r, e, s;
	pid_t child;

	TRY(chmod(".", 0777));
	child = TRY(fork());
	if (child == 0) {
		TRY(setgroups(4, groups));
		TRY(setresgid(11, 12, 13));
		setfsgid(14);
		TRY(setresuid(21, 0, 23));
		setfsuid(24);
		zoo_tell("child");
		zoo_wait();
		TRY(getresuid(&r, &e, &s));
		CHECK(r == 21 && e == 0 && s == 23);
		CHECK_EQ(setfsuid(-1), 24);
		TRY(getresgid(&r, &e, &s));
		CHECK(r == 11 && e == 12 && s == 13);
		CHECK_EQ(setfsgid(-1), 14);
		CHECK_EQ(getgroups(8, now), 4);
		CHECK(memcmp(now, groups, sizeof groups) == 0);
		_exit(0);
	}
	zoo_await("child");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 0);
	zoo_pass();
}
