// area: control groups
// shows: BPF programs of groups that the tree has made are warned of
// modes: plain leave-running
// options: --manage-cgroups
// needs: /sys/fs/cgroup/unified
// restore: --policy-rule foreign.cgroups.allow="all"
// warns: /inner (cgroup_inet_egress, cgroup_device): are not kept
// foreign: no CRIU keeps no programs of groups
#include "cgroup.h"
#include <linux/bpf.h>
#include <sys/syscall.h>

#define TOP "/sys/fs/cgroup/unified"

static long bpf(int command, union bpf_attr *attr)
{
	return syscall(SYS_bpf, command, attr, sizeof *attr);
}

/* Attaches a program that allows all. */
static void attach(const char *group, unsigned type, unsigned place)
{
	/* r0 = 1; exit */
	struct bpf_insn all[] = {
		{ .code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = BPF_REG_0, .imm = 1 },
		{ .code = BPF_JMP | BPF_EXIT },
	};
	union bpf_attr load = {
		.prog_type = type,
		.insn_cnt = sizeof all / sizeof *all,
		.insns = (uintptr_t)all,
		.license = (uintptr_t) "GPL",
	};
	int program = (int)TRY(bpf(BPF_PROG_LOAD, &load)), dir = TRY(open(group, O_RDONLY | O_DIRECTORY));
	union bpf_attr place_ = {
		.target_fd = (unsigned)dir,
		.attach_bpf_fd = (unsigned)program,
		.attach_type = place,
		.attach_flags = BPF_F_ALLOW_MULTI,
	};

	TRY(bpf(BPF_PROG_ATTACH, &place_));
	TRY(close(dir));
	TRY(close(program));
}

int main(void)
{
	char group[128], inner[160];
	struct stat st;
	pid_t child;

	TRY(stat(".", &st));
	snprintf(group, sizeof group, TOP "/zoo-bpf-%lu", (unsigned long)st.st_ino);
	snprintf(inner, sizeof inner, "%s/inner", group);
	TRY(mkdir(group, 0755));
	TRY(mkdir(inner, 0755));
	/* Of the group that its starter might have made nobody is warned. */
	attach(group, BPF_PROG_TYPE_CGROUP_DEVICE, BPF_CGROUP_DEVICE);
	attach(inner, BPF_PROG_TYPE_CGROUP_SKB, BPF_CGROUP_INET_EGRESS);
	attach(inner, BPF_PROG_TYPE_CGROUP_DEVICE, BPF_CGROUP_DEVICE);
	enter(group);
	child = TRY(fork());
	if (!child) {
		enter(inner);
		zoo_tell("inside");
		zoo_wait();
		enter(TOP);
		_exit(3);
	}
	zoo_await("inside");
	zoo_ready();
	zoo_wait();
	CHECK_EXIT(child, 3);
	enter(TOP);
	TRY(rmdir(inner));
	TRY(rmdir(group));
	zoo_pass();
}
