// area: TCP
// shows: connections behind iptables rules that pass only what they have seen begin, while iptables locks the network
// modes: plain ns sealed userns
// options: --tcp-established
// dump: --network-lock iptables
// files: /usr/sbin/iptables-legacy /usr/sbin/ip6tables-legacy /usr/lib/x86_64-linux-gnu/xtables/libxt_conntrack.so /usr/lib/x86_64-linux-gnu/xtables/libxt_standard.so
// needs: /usr/sbin/iptables-legacy
// foreign: yes
#include "tcp_firewall_iptables.c"
