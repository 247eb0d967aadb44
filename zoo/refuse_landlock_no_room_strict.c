// area: refusals
// shows: --strict: a task with no room for the process that would tell whether Landlock confines it is refused, whatever it can do
// dump: --strict
// expect: refused "whether it is confined by Landlock"
#include "landlock_no_room.c"
