// area: other namespaces
// shows: host and domain name
// modes: ns userns
#include "zoo.h"
#include <sys/utsname.h>

int main(void)
{
	struct utsname name;

	TRY(sethostname("hibernator", 10));
	TRY(setdomainname("burrow", 6));
	zoo_ready();
	zoo_wait();
	TRY(uname(&name));
	CHECK(strcmp(name.nodename, "hibernator") == 0);
	CHECK(strcmp(name.domainname, "burrow") == 0);
	zoo_pass();
}
