// area: other task state
// shows: the personality: no address randomization
// foreign: yes
#include "zoo.h"
#include <sys/personality.h>

int main(void)
{
	TRY(personality(ADDR_NO_RANDOMIZE | SHORT_INODE));
	zoo_ready();
	zoo_wait();
	CHECK_EQ(personality(0xffffffff), ADDR_NO_RANDOMIZE | SHORT_INODE);
	zoo_pass();
}
