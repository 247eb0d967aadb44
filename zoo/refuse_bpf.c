// area: refusals
// shows: a BPF program that is held by a descriptor is refused
// modes: plain leave-running
// expect: refused "bpf"
#include "zoo.h"
#include <linux/bpf.h>

int main(void)
{
	struct bpf_insn code[] = {
		{ .code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = 0, .imm = 0 },
		{ .code = BPF_JMP | BPF_EXIT },
	};
	union bpf_attr attr = { .prog_type = BPF_PROG_TYPE_SOCKET_FILTER };
	int fd;

	attr.insns = (uintptr_t)code;
	attr.insn_cnt = 2;
	attr.license = (uintptr_t) "Apache-2.0";
	fd = (int)syscall(SYS_bpf, BPF_PROG_LOAD, &attr, sizeof attr);
	if (fd < 0)
		zoo_skip("no BPF");
	zoo_ready();
	zoo_wait();
	CHECK(fcntl(fd, F_GETFD) >= 0);
	zoo_pass();
}
