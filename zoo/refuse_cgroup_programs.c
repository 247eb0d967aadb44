// area: refusals
// shows: BPF programs of groups that the tree has made are refused with --strict
// modes: plain leave-running
// options: --manage-cgroups
// needs: /sys/fs/cgroup/unified
// dump: --strict
// expect: refused "/inner (cgroup_inet_egress, cgroup_device): are not kept"
#include "cgroup_programs_left_out.c"
