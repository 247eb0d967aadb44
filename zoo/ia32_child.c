// area: 32-bit programs
// shows: the 32-bit child of a 64-bit program, with nothing but pause(2), goes on
// foreign: yes
#include "other_bits.h"

/* An ELF file of one segment at 8048000, and pause(2) for ever. */
static const unsigned char program[] = {
	0x7f, 'E', 'L', 'F', 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0,
	2, 0, 3, 0, 1, 0, 0, 0, 0x54, 0x80, 4, 8, 0x34, 0, 0, 0,
	0, 0, 0, 0, 0, 0, 0, 0, 0x34, 0, 0x20, 0, 1, 0, 0, 0,
	0, 0, 0, 0,
	1, 0, 0, 0, 0, 0, 0, 0, 0, 0x80, 4, 8, 0, 0x80, 4, 8,
	0x5d, 0, 0, 0, 0x5d, 0, 0, 0, 5, 0, 0, 0, 0, 0x10, 0, 0,
	0xb8, 0x1d, 0, 0, 0, 0xcd, 0x80, 0xeb, 0xf7,
};

int main(void)
{
	pid_t child = other_bits_start("./thirty-two", program, sizeof program);

	if (!child)
		zoo_skip("this kernel runs no 32-bit programs");
	zoo_ready();
	zoo_wait();
	other_bits_end(child);
	zoo_pass();
}
