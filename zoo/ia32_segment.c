// area: 32-bit programs
// shows: a 64-bit program runs 32-bit code in a thread, and has a segment for it, as emulators do
// foreign: yes
#include "zoo.h"
#include <asm/ldt.h>
#include <pthread.h>
#include <stddef.h>

/* What 32-bit code can reach, of which the address is put into the code. */
struct low {
	unsigned char code[64];
	unsigned long stack;
	unsigned int go, loops, segment;
	struct user_desc desc;
	unsigned char below[4096];
};

static struct low *low;

/* System calls of 32-bit programs. */
static int call32(int number, void *arg)
{
	int result;

	__asm__ volatile("int $0x80" : "=a"(result) : "a"(number), "b"(arg) : "memory", "r8", "r9", "r10", "r11");
	return result;
}

/* Far return to the 32-bit code on the stack in reach; it comes back to the end of this. */
static void *enter(void *arg)
{
	__asm__ volatile("push %%rbx; push %%rbp\n"
			 "mov %%rsp, %c[stack](%[low])\n"
			 "lea %c[end](%[low]), %%rsp\n"
			 "mov $0x2b, %%eax; mov %%eax, %%ds\n"
			 "push $0x23\n"
			 "push %[low]\n"
			 "lretq\n"
			 ".globl back\n"
			 "back:\n"
			 "pop %%rbp; pop %%rbx\n"
			 :
			 : [low] "D"(low), [stack] "i"(offsetof(struct low, stack)), [end] "i"(sizeof(struct low) - 64)
			 : "rax", "rcx", "rdx", "rsi", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "memory");
	return arg;
}

static unsigned char *put(unsigned char *at, const void *bytes, size_t len)
{
	memcpy(at, bytes, len);
	return at + len;
}

static unsigned char *address(unsigned char *at, const void *to)
{
	unsigned int low32 = (uintptr_t)to;

	return put(at, &low32, 4);
}

extern char back[];

int main(void)
{
	unsigned char *at, *again, *native;
	void *target = back;
	pthread_t thread;

	low = mmap(NULL, sizeof *low, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
	CHECK(low != MAP_FAILED);
	low->desc = (struct user_desc){ .entry_number = -1, .base_addr = (uintptr_t)&low->segment, .limit = 0xfffff,
					.seg_32bit = 1, .limit_in_pages = 1, .useable = 1 };
	if (call32(243, &low->desc))
		zoo_skip("no set_thread_area");
	/* again: incl loops; cmpl $0, go; je again; ljmp $0x33, native */
	at = again = low->code;
	at = address(put(at, "\xff\x05", 2), &low->loops);
	at = address(put(at, "\x83\x3d", 2), &low->go);
	at = put(at, "\0", 1);
	at = put(at, "\x74", 1);
	*at = (unsigned char)(again - (at + 1));
	at++;
	at = put(at, "\xea", 1);
	native = at + 6;
	at = address(at, native);
	at = put(at, "\x33\0", 2);
	/* native: mov stack, %rsp; movabs $back, %rax; jmp *%rax */
	at = address(put(at, "\x48\x8b\x24\x25", 4), &low->stack);
	at = put(at, "\x48\xb8", 2);
	at = put(at, &target, 8);
	put(at, "\xff\xe0", 2);

	CHECK_EQ(pthread_create(&thread, NULL, enter, NULL), 0);
	WAIT_UNTIL(*(volatile unsigned int *)&low->loops > 0);
	zoo_ready();
	zoo_wait();
	unsigned int before = *(volatile unsigned int *)&low->loops;
	WAIT_UNTIL(*(volatile unsigned int *)&low->loops != before);
	*(volatile unsigned int *)&low->go = 1;
	CHECK_EQ(pthread_join(thread, NULL), 0);
	struct user_desc was = low->desc;
	memset(&low->desc, 0, sizeof low->desc);
	low->desc.entry_number = was.entry_number;
	CHECK_EQ(call32(244, &low->desc), 0);
	CHECK_EQ(memcmp(&low->desc, &was, sizeof was), 0);
	zoo_pass();
}
