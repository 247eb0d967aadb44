// area: 32-bit programs
// shows: the 64-bit child of a 32-bit program goes on
// build: -m32
// foreign: yes
#include "other_bits.h"

/* An ELF file of one segment at 400000, and pause(2) for ever. */
static const unsigned char program[] = {
	0x7f, 'E', 'L', 'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0,
	2, 0, 0x3e, 0, 1, 0, 0, 0, 0x78, 0, 0x40, 0, 0, 0, 0, 0,
	0x40, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
	0, 0, 0, 0, 0x40, 0, 0x38, 0, 1, 0, 0, 0, 0, 0, 0, 0,
	1, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
	0, 0, 0x40, 0, 0, 0, 0, 0, 0, 0, 0x40, 0, 0, 0, 0, 0,
	0x81, 0, 0, 0, 0, 0, 0, 0, 0x81, 0, 0, 0, 0, 0, 0, 0,
	0, 0x10, 0, 0, 0, 0, 0, 0,
	0xb8, 0x22, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xf7,
};

int main(void)
{
	pid_t child = other_bits_start("./sixty-four", program, sizeof program);

	CHECK_EQ(child > 0, 1);
	zoo_ready();
	zoo_wait();
	other_bits_end(child);
	zoo_pass();
}
