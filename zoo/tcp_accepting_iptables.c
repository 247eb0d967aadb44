// area: TCP
// shows: connections that wait to be accepted at nearly every moment are all served, while iptables locks the network
// modes: plain leave-running ns
// options: --tcp-established
// dump: --network-lock iptables
// varies: fd
// foreign: yes
// needs: /usr/sbin/iptables-legacy
#include "tcp_accepting.c"
