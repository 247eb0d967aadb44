// area: refusals
// shows: settings of a network namespace that are not kept are refused with --strict
// modes: ns
// dump: --strict
// expect: refused "what its network is set to by sysctl (net.core.somaxconn, net.ipv4.ip_unprivileged_port_start)"
#include "netns_settings_left_out.c"
