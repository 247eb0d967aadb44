/* A firewall that lets nothing pass but connections that it has seen begin. */
#ifndef ZOO_FIREWALL_H
#define ZOO_FIREWALL_H

#include "zoo.h"

static inline int firewall_run(char *const *argv)
{
	pid_t pid = TRY(fork());

	if (pid == 0) {
		setenv("XTABLES_LOCKFILE", zoo_path("xtables.lock"), 1);
		execv(argv[0], argv);
		_exit(99);
	}
	return zoo_reap(pid);
}

#define FIREWALL_RUN(...) firewall_run((char *[]){ __VA_ARGS__, NULL })

/* Chains before, beside and after those of a lock, which are at 0. 58 is ICMP for IPv6: a container without
   /etc/protocols does not know its name. */
static inline void firewall_nft(void)
{
	char *const priorities[] = { "-150", "0", "10" };
	char rules[512];

	for (int i = 0; i < 3; i++) {
		snprintf(rules, sizeof rules,
			 "table inet zoo {"
			 " chain in%d { type filter hook input priority %s; policy drop;"
			 "  ct state new,established accept; meta l4proto 58 accept; };"
			 " chain out%d { type filter hook output priority %s; policy drop;"
			 "  ct state new,established accept; meta l4proto 58 accept; }; }",
			 i, priorities[i], i, priorities[i]);
		if (FIREWALL_RUN("/usr/sbin/nft", rules))
			zoo_skip("no nftables");
	}
}

/* It may be gone already, if this namespace is not the program's own. */
static inline void firewall_nft_down(void)
{
	FIREWALL_RUN("/usr/sbin/nft", "add table inet zoo; delete table inet zoo");
}

static char *const firewall_tables[] = { "/usr/sbin/iptables-legacy", "/usr/sbin/ip6tables-legacy" };

/* A rule at the head of each chain, before which those of a lock are, too, and one at its end. */
static inline void firewall_iptables(void)
{
	for (int v6 = 0; v6 < 2; v6++)
		for (int out = 0; out < 2; out++) {
			char *table = firewall_tables[v6], *chain = out ? "OUTPUT" : "INPUT";

			if (FIREWALL_RUN(table, "-A", chain, "-m", "conntrack", "--ctstate", "NEW", "-j", "ACCEPT") ||
			    FIREWALL_RUN(table, "-I", chain, "-m", "conntrack", "--ctstate", "ESTABLISHED",
					 "-j", "ACCEPT") ||
			    FIREWALL_RUN(table, "-I", chain, "-m", "conntrack", "--ctstate", "INVALID",
					 "-j", "DROP") ||
			    FIREWALL_RUN(table, "-P", chain, "DROP"))
				zoo_skip("no iptables");
		}
}

static inline void firewall_iptables_down(void)
{
	for (int v6 = 0; v6 < 2; v6++)
		for (int out = 0; out < 2; out++) {
			char *table = firewall_tables[v6], *chain = out ? "OUTPUT" : "INPUT";

			CHECK(!FIREWALL_RUN(table, "-P", chain, "ACCEPT"));
			CHECK(!FIREWALL_RUN(table, "-F", chain));
		}
	unlink(zoo_path("xtables.lock"));
}

#endif
