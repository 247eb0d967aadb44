// area: network namespaces
// shows: a bridge with a port and addresses, none of which is tentative after the restore
// modes: ns userns
// files: /usr/sbin/ip
// needs: /usr/sbin/ip
#include "zoo.h"

static void bridge_make(void)
{
	FILE *commands = fopen(zoo_path("commands"), "we");
	pid_t pid;

	CHECK(commands);
	fputs("link add zoo0 type bridge\n"
	      "link add zoo1 type veth peer name zoo2\n"
	      "link set zoo1 master zoo0\n"
	      "link set zoo1 up\n"
	      "link set zoo2 up\n"
	      "link set zoo0 up\n"
	      "address add 10.77.0.1/24 dev zoo0\n"
	      "address add fd77::1/64 dev zoo0\n",
	      commands);
	CHECK(fclose(commands) == 0);
	pid = TRY(fork());
	if (pid == 0) {
		execl("/usr/sbin/ip", "ip", "-batch", zoo_path("commands"), NULL);
		_exit(99);
	}
	CHECK_EXIT(pid, 0);
}

/* How many IPv6 addresses the bridge has, and how many of them are tentative. */
static void bridge_addresses(int *all, int *tentative)
{
	FILE *list = fopen("/proc/net/if_inet6", "re");
	unsigned flags;
	char name[32];

	CHECK(list);
	*all = *tentative = 0;
	while (fscanf(list, "%*s %*x %*x %*x %x %31s", &flags, name) == 2) {
		if (strcmp(name, "zoo0"))
			continue;
		++*all;
		*tentative += flags >> 6 & 1; /* IFA_F_TENTATIVE */
	}
	fclose(list);
}

static bool bridge_is_settled(int wanted)
{
	int all, tentative;

	bridge_addresses(&all, &tentative);
	return all == wanted && tentative == 0;
}

int main(void)
{
	int all, tentative;

	bridge_make();
	WAIT_UNTIL(bridge_is_settled(2));
	zoo_ready();
	zoo_wait();
	bridge_addresses(&all, &tentative);
	CHECK_EQ(all, 2);
	CHECK_EQ(tentative, 0);
	zoo_pass();
}
