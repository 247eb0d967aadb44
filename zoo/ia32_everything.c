// area: 32-bit programs
// shows: a 32-bit program with threads, timers, pipes, sockets, memory and children at work, all verified all the time
// foreign: yes
// options: --tcp-established --file-locks
// varies: fd maps timers files SigPnd ShdPnd SigBlk
// build: -m32
#include "everything.c"
