// area: TCP
// shows: connections behind nftables rules that pass only what they have seen begin, while iptables locks the network
// modes: plain ns sealed userns
// options: --tcp-established
// dump: --network-lock iptables
// files: /usr/sbin/nft
// needs: /usr/sbin/nft
// foreign: yes
#include "tcp_firewall_nft.c"
