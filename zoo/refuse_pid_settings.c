// area: refusals
// shows: settings of a pid namespace that are not kept are refused with --strict
// modes: pidns ns
// dump: --strict
// expect: refused "what its pid namespace is set to by sysctl (vm.memfd_noexec"
#include "pid_settings_left_out.c"
